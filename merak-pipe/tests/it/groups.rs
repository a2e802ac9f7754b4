//! The engine over process groups of merak-mpu.

use crate::engine::{Stages, modules, results, sequential, v_shape};
use merak_mpu::{Message, Packet, into_vec, testing};
use merak_pipe::{Action, GroupLink, PipelineEngine, Schedule, ScheduleKind, Size, StageModule};

/// A payload of one number that travels as a message of a process group.
#[derive(Debug)]
struct Number(f64);

impl From<Number> for Message {
    fn from(number: Number) -> Self {
        let data = Box::new(vec![number.0]);
        vec![Packet {
            shape: Vec::new(),
            data,
        }]
    }
}

impl TryFrom<Message> for Number {
    type Error = String;

    fn try_from(mut message: Message) -> Result<Self, String> {
        let packet = message.pop().ok_or("the message is empty")?;
        let values = into_vec::<f64>(packet.data).map_err(|e| e.to_string())?;
        values
            .first()
            .map(|x| Self(*x))
            .ok_or_else(|| "no number".into())
    }
}

/// [`Stages`] that send [`Number`]s.
struct OverGroups(Stages);

impl StageModule for OverGroups {
    type Payload = Number;
    type Error = String;

    fn forward(&mut self, action: Action, input: Option<Number>) -> Result<Option<Number>, String> {
        Ok(self.0.forward(action, input.map(|x| x.0))?.map(Number))
    }

    fn backward_input(
        &mut self,
        action: Action,
        grad: Option<Number>,
    ) -> Result<Option<Number>, String> {
        Ok(self
            .0
            .backward_input(action, grad.map(|x| x.0))?
            .map(Number))
    }

    fn backward_weight(&mut self, action: Action) -> Result<(), String> {
        self.0.backward_weight(action)
    }

    fn recompute(&mut self, action: Action) -> Result<(), String> {
        self.0.recompute(action)
    }
}

/// Runs `steps` steps of a schedule on a world of merak-mpu.
fn run_over_groups(
    schedule: &Schedule,
    fault: Option<Action>,
    steps: usize,
) -> Vec<Result<Stages, String>> {
    testing::world(schedule.size.ranks, |member| {
        let rank = member.rank().0;
        let mut module = OverGroups(modules(schedule).swap_remove(rank));
        module.0.fault = fault;
        let mut link = GroupLink::new(member.world_group().map_err(|e| e.to_string())?);
        let engine = PipelineEngine::new(schedule, rank).map_err(|e| e.to_string())?;
        for _ in 0..steps {
            engine
                .run(&mut module, &mut link)
                .map_err(|e| e.to_string())?;
        }
        Ok(module.0)
    })
}

#[test]
fn process_groups_carry_every_schedule() {
    for kind in ScheduleKind::ALL {
        let size = Size::new(3, 5).with_chunks(kind.fixed_chunks().unwrap_or(2));
        let schedule = kind.generate(size).unwrap();
        let ranks: Result<Vec<Stages>, String> =
            run_over_groups(&schedule, None, 1).into_iter().collect();
        assert_eq!(
            results(&ranks.unwrap()),
            sequential(size.stages(), 5, kind.is_training()),
            "{kind}"
        );
    }
    let ranks: Result<Vec<Stages>, String> =
        run_over_groups(&v_shape(), None, 1).into_iter().collect();
    assert_eq!(results(&ranks.unwrap()), sequential(4, 2, true));
}

#[test]
fn process_groups_carry_step_after_step() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(3, 4)).unwrap();
    for rank in run_over_groups(&schedule, None, 3) {
        let losses = rank.unwrap().losses;
        assert!(losses.is_empty() || losses[..4] == losses[8..]);
    }
}

#[test]
fn a_fault_poisons_the_process_group_and_names_the_culprit() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(3, 4)).unwrap();
    let fault = "1B0".parse().ok();
    let errors: Vec<String> = run_over_groups(&schedule, fault, 1)
        .into_iter()
        .map(|r| r.unwrap_err())
        .collect();
    insta::assert_snapshot!(errors.join("\n"), @"
    rank 1 failed: 1B0: the loss is NaN
    rank 1 failed in 1B0 (stage 1, microbatch 0)
    rank 1 failed: 1B0: the loss is NaN
    ");
}

/// A payload of bytes that travels as a message of a process group.
struct Bytes(Vec<u8>);

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl From<Bytes> for Vec<u8> {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

impl From<Bytes> for Message {
    fn from(bytes: Bytes) -> Self {
        vec![Packet {
            shape: vec![bytes.0.len()],
            data: Box::new(bytes.0),
        }]
    }
}

impl TryFrom<Message> for Bytes {
    type Error = String;

    fn try_from(mut message: Message) -> Result<Self, String> {
        let packet = message.pop().ok_or("the message is empty")?;
        into_vec(packet.data).map(Self).map_err(|e| e.to_string())
    }
}

#[test]
fn links_over_groups_keep_the_promises_of_a_link() {
    use merak_mpu::threads::{WorldOptions, world};
    merak_pipe::testing::check_links::<Bytes, _>(|ranks, timeout| {
        let options = WorldOptions {
            timeout,
            ..WorldOptions::default()
        };
        let members = world(ranks, options).into_iter();
        members
            .map(|member| GroupLink::new(member.world_group().expect("the world is new")))
            .collect()
    });
}
