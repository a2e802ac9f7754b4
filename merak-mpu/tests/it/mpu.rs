use merak_mpu::{
    Axis, Coord, Degrees, EMBEDDING, Error, GroupKind, InitOptions, Launch, Member, Mpu, Rank,
    ReduceOp,
    testing::{assert_close, world},
    threads,
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use tracing::{
    Event, Metadata, Subscriber,
    span::{Attributes, Id, Record},
    subscriber::with_default,
};

const CUBE: Degrees = Degrees {
    dp: 2,
    tp: 2,
    pp: 2,
    sp: 2,
};

fn in_cube<T: Send>(body: impl Fn(Mpu) -> T + Sync) -> Vec<T> {
    world(16, |member| {
        let mpu = Mpu::new(member, CUBE).expect("the degrees fit");
        body(
            mpu.with_tied(EMBEDDING, &[0, 1])
                .expect("both stages exist"),
        )
    })
}

#[test]
fn every_rank_of_the_cube_has_its_row_of_the_group_table() {
    in_cube(|mpu| {
        for kind in GroupKind::ALL {
            let expected = mpu
                .topology()
                .groups(kind)
                .into_iter()
                .find(|group| group.contains(&mpu.rank()));
            assert_eq!(Some(mpu.group(kind).members().to_vec()), expected, "{kind}");
            assert_eq!(mpu.group(kind).name(), kind.as_str());
        }
        let tied = mpu.embedding_group().unwrap().unwrap();
        let low = mpu.rank().0 % 8;
        assert_eq!(tied.members(), [low, low + 8]);
    });
}

#[test]
fn rank_eleven_stands_where_its_bits_say() {
    let mut answers = in_cube(|mpu| {
        (mpu.rank() == 11).then(|| {
            let Coord { pp, dp, sp, tp } = mpu.coord();
            assert_eq!((pp, dp, sp, tp), (1, 0, 1, 1));
            assert_eq!(mpu.pipeline_parallel_rank(), 1);
            assert_eq!(mpu.data_parallel_rank(), 0);
            assert_eq!(mpu.sequence_parallel_rank(), 1);
            assert_eq!(mpu.tensor_parallel_rank(), 1);
            assert_eq!(mpu.data_sequence_parallel_rank(), 1);
            assert_eq!(mpu.data_sequence_parallel_world_size(), 4);
            assert_eq!(mpu.data_parallel_group().members(), [11, 15]);
            assert_eq!(mpu.tensor_parallel_group().members(), [10, 11]);
            assert_eq!(mpu.pipeline_parallel_group().members(), [3, 11]);
            assert_eq!(mpu.sequence_parallel_group().members(), [9, 11]);
            assert_eq!(
                mpu.data_sequence_parallel_group().members(),
                [9, 11, 13, 15]
            );
            assert_eq!(mpu.model_parallel_group().members(), [2, 3, 10, 11]);
            assert_eq!(mpu.replica_group().members(), [0, 1, 2, 3, 8, 9, 10, 11]);
            assert_eq!(mpu.world_group().world_size(), 16);
            assert_eq!(mpu.axis_group(Axis::Data).members(), [11, 15]);
            assert_eq!(mpu.tensor_parallel_src_rank(), Rank(10));
            assert_eq!(mpu.prev_stage_rank(), Some(Rank(3)));
            assert_eq!(mpu.next_stage_rank(), None);
            assert!(mpu.is_last_stage() && !mpu.is_first_stage());
            assert_eq!(mpu.stage_to_global(0).unwrap(), Rank(3));
            assert!(mpu.stage_to_global(2).is_err());
        })
    });
    assert!(answers.swap_remove(11).is_some());
}

#[test]
fn sums_over_each_kind_of_group_are_sums_of_its_members() {
    in_cube(|mpu| {
        for kind in GroupKind::ALL {
            let group = mpu.group(kind);
            let sum = group.all_reduce_scalar(mpu.rank().0 as f64, ReduceOp::Sum);
            let expected: usize = group.members().iter().map(|rank| rank.0).sum();
            assert_close(&[sum.unwrap()], &[expected as f64], 0.0, 0.0);
        }
    });
}

#[test]
fn a_stage_that_does_not_own_a_tied_weight_has_no_group_for_it() {
    let degrees = Degrees {
        pp: 4,
        ..Degrees::default()
    };
    let members = world(4, |member| {
        let mpu = Mpu::new(member, degrees).unwrap();
        let mpu = mpu.with_tied("head", &[0, 3]).unwrap();
        let error = mpu.tied_group("haed").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"no tied group is named "haed"; there are ["head"]"#
        );
        let group = mpu.tied_group("head").unwrap();
        group.map(|group| group.all_reduce_scalar(1_u32, ReduceOp::Sum).unwrap())
    });
    assert_eq!(members, [Some(2), None, None, Some(2)]);
}

fn alone() -> Member {
    threads::world(1, threads::WorldOptions::default()).remove(0)
}

#[test]
fn a_second_setup_with_other_degrees_is_an_error_until_the_first_is_destroyed() {
    world(2, |member| {
        let (data, tensor) = (
            Degrees {
                dp: 2,
                ..Degrees::default()
            },
            Degrees {
                tp: 2,
                ..Degrees::default()
            },
        );
        let mpu = Mpu::new(member.clone(), data).unwrap();
        assert!(Mpu::new(member.clone(), data).is_ok());
        let error = Mpu::new(member.clone(), tensor).unwrap_err();
        assert_eq!(
            error.to_string(),
            "this world was set up with dp 2 x tp 1 x pp 1 x sp 1, \
             so it cannot be set up with dp 1 x tp 2 x pp 1 x sp 1"
        );
        mpu.destroy();
        assert!(Mpu::new(member, tensor).is_ok());
    });
}

#[test]
fn options_of_init_each_have_an_effect() {
    let options = InitOptions {
        tied: vec![("head".into(), vec![0])],
        ..InitOptions::default()
    };
    assert!(
        options
            .init_member(alone())
            .unwrap()
            .tied_group("head")
            .is_ok()
    );
    for field in 0..4 {
        let two = |index| if field == index { 2 } else { 1 };
        let options = InitOptions {
            dp: two(0),
            tp: two(1),
            pp: two(2),
            sp: two(3),
            ..InitOptions::default()
        };
        let error = options.init_member(alone()).unwrap_err();
        assert!(matches!(error, Error::WorldSize { .. }), "{error}");
    }
}

#[test]
fn launched_processes_join_over_tcp() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let options = InitOptions {
        dp: 3,
        timeout: std::time::Duration::from_secs(20),
        ..InitOptions::default()
    };
    let options = &options;
    let sum = move |rank: usize| {
        let launch = Launch {
            rank,
            world_size: 3,
            address: Some("127.0.0.1".into()),
            port: Some(port),
            job: Some(format!("launched-{}", std::process::id())),
            ..Launch::default()
        };
        let mpu = options.init_launched(&launch)?;
        mpu.world_group()
            .all_reduce_scalar(mpu.rank().0 as f32, ReduceOp::Sum)
    };
    let sums = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || sum(rank))).collect();
        let sums = ranks.into_iter().map(|rank| rank.join().unwrap());
        sums.collect::<Result<Vec<_>, _>>()
    });
    assert_eq!(sums.unwrap(), [3.0; 3]);
}

#[test]
fn processes_that_cannot_find_rank_0_are_refused_with_the_variable_that_asked_for_them() {
    let launch = |variables: &'static [(&str, &str)]| {
        Launch::from_lookup(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    };
    let four = launch(&[
        ("SLURM_STEP_ID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_PROCID", "3"),
    ])
    .unwrap();
    assert_eq!((four.rank, four.world_size), (3, 4));
    let error = InitOptions::default().init_launched(&four).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the engine tcp does not fit: SLURM_NTASKS asks for 4 processes, and nothing says on which \
         host rank 0 is, as SLURM_STEP_NODELIST would: set MASTER_ADDR to it"
    );
    // Outside of a step, SLURM's variables speak of the job and start nothing.
    let script = launch(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]).unwrap();
    assert_eq!(script, Launch::default());
    assert!(InitOptions::default().init_launched(&script).is_ok());
}

/// Counts the messages that a thread logs.
struct Counter(Arc<AtomicUsize>);

impl Subscriber for Counter {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_message_of_rank_0_is_logged_by_no_other_rank() {
    in_cube(|mpu| {
        let count = Arc::new(AtomicUsize::new(0));
        let counter = Counter(Arc::clone(&count));
        with_default(counter, || mpu.print_rank_0("ready"));
        let logged = count.load(Ordering::Relaxed);
        assert_eq!(logged, usize::from(mpu.rank() == 0));
    });
}
