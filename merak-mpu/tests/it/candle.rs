use candle_core::{DType as CandleType, Device, Shape, Tensor, Var, WithDType};
use half::{bf16, f16};
use merak_mpu::{
    Buffer, Communicator, DType, Element, HostTensor, Packet, ReduceOp,
    candle::{TensorBuffer, dtype_of, vars_by_name},
    into_vec,
    testing::world,
};
use std::sync::Mutex;

fn tensor<T: WithDType>(values: &[T], shape: impl Into<Shape>) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).expect("the numbers of a test fit")
}

/// Rank `r` has `r + 1, r + 2, ..`.
fn counted(rank: usize, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let values = (0..shape.elem_count()).map(|i| (rank + 1 + i) as f32);
    Tensor::from_vec(values.collect(), shape, &Device::Cpu).expect("the numbers of a test fit")
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor
        .flatten_all()
        .expect("the numbers of a test fit")
        .to_vec1()
        .expect("the numbers of a test fit")
}

fn place(tensor: &Tensor) -> usize {
    let mut place = 0;
    let buffer = TensorBuffer::new(tensor).expect("the numbers of a test fit");
    buffer.read(&mut |bytes| place = bytes.as_ptr().addr());
    place
}

#[test]
fn a_contiguous_tensor_is_reduced_where_it_lies() {
    let results = world(2, |member| {
        let group = member.world_group().unwrap();
        let whole = counted(member.rank().0, (3, 2));
        let rows = whole.narrow(0, 1, 2).unwrap();
        let before = place(&rows);
        group.all_reduce_tensor(&rows, ReduceOp::Sum).unwrap();
        assert_eq!(place(&rows), before);
        values(&whole)
    });
    // The first row is no part of the sum.
    assert_eq!(results[0], [1.0, 2.0, 7.0, 9.0, 11.0, 13.0]);
    assert_eq!(results[1], [2.0, 3.0, 7.0, 9.0, 11.0, 13.0]);
}

#[test]
fn a_strided_tensor_gets_the_sum_in_its_own_places() {
    let results = world(2, |member| {
        let group = member.world_group().unwrap();
        let whole = counted(member.rank().0, (2, 3));
        let column = whole.narrow(1, 1, 1).unwrap();
        group.all_reduce_tensor(&column, ReduceOp::Max).unwrap();
        values(&whole)
    });
    assert_eq!(results[0], [1.0, 3.0, 3.0, 4.0, 6.0, 6.0]);
    assert_eq!(results[1], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
}

#[test]
fn every_collective_works_along_the_first_dim() {
    let results = world(2, |member| {
        let (group, rank) = (member.world_group().unwrap(), member.rank().0);
        let own = || counted(10 * rank, (2, 2));
        let gathered = group.all_gather_tensor(&own()).unwrap();
        let scattered = group.reduce_scatter_tensor(&own(), ReduceOp::Sum).unwrap();
        let (exchanged, copied) = (own(), own());
        group.all_to_all_tensor(&exchanged).unwrap();
        group.broadcast_tensor(&copied, 1).unwrap();
        let scalar = group.all_gather_tensor(&Tensor::new(rank as f32, &Device::Cpu).unwrap());
        assert_eq!(gathered.dims(), [4, 2]);
        assert_eq!(scattered.dims(), [1, 2]);
        assert_eq!(values(&scalar.unwrap()), [0.0, 1.0]);
        [gathered, scattered, exchanged, copied].map(|tensor| values(&tensor))
    });
    let all = [1.0, 2.0, 3.0, 4.0, 11.0, 12.0, 13.0, 14.0];
    assert_eq!(results[0][0], all);
    assert_eq!(results[1][0], all);
    assert_eq!(
        [&results[0][1], &results[1][1]],
        [&[12.0, 14.0], &[16.0, 18.0]]
    );
    assert_eq!(results[0][2], [1.0, 2.0, 11.0, 12.0]);
    assert_eq!(results[1][2], [3.0, 4.0, 13.0, 14.0]);
    assert_eq!(results[0][3], all[4..]);
    assert_eq!(results[1][3], all[4..]);
}

#[test]
fn a_group_of_one_gives_each_tensor_back() {
    world(1, |member| {
        let group = member.world_group().unwrap();
        let own = counted(0, (2, 2));
        let strided = own.t().unwrap();
        assert_eq!(
            values(&group.all_gather_tensor(&own).unwrap()),
            values(&own)
        );
        let scattered = group.reduce_scatter_tensor(&strided, ReduceOp::Sum);
        assert_eq!(values(&scattered.unwrap()), values(&strided));
        group.all_reduce_tensor(&own, ReduceOp::Sum).unwrap();
        assert_eq!(values(&own), [1.0, 2.0, 3.0, 4.0]);
    });
}

#[test]
fn every_element_type_is_summed() {
    fn check<T: Element + WithDType>(one: T, two: T) {
        let sums = world(2, |member| {
            let own = tensor(&[one, two], 2);
            let group = member.world_group().unwrap();
            group.all_reduce_tensor(&own, ReduceOp::Sum).unwrap();
            own.to_vec1::<T>().unwrap()[0]
        });
        assert_eq!(sums, [two; 2], "{}", <T as Element>::DTYPE);
    }
    check(1.0_f64, 2.0);
    check(1.0_f32, 2.0);
    check(bf16::from_f32(1.0), bf16::from_f32(2.0));
    check(f16::from_f32(1.0), f16::from_f32(2.0));
    check(1_i64, 2);
    check(1_u32, 2);
    check(1_u8, 2);
    for dtype in DType::ALL {
        assert_eq!(dtype_of(dtype.into()), Some(dtype));
    }
    assert_eq!(dtype_of(CandleType::I16), None);
}

#[test]
fn a_message_between_threads_moves_no_element() {
    let places = world(2, |member| {
        let group = member.world_group().unwrap();
        if member.rank().0 == 0 {
            let own = counted(3, (2, 3));
            group.send_tensor(1, 7, &own).unwrap();
            group.barrier().unwrap();
            return place(&own);
        }
        let received: Tensor = group.recv_tensor(0, 7).unwrap();
        assert_eq!((received.dims(), values(&received)[0]), (&[2, 3][..], 4.0));
        group.barrier().unwrap();
        place(&received)
    });
    assert_eq!(places[0], places[1]);
}

#[test]
fn a_variable_is_sent_as_the_copy_that_no_step_changes() {
    let var = Var::from_tensor(&counted(0, 2)).unwrap();
    let packet = Packet::of_tensor(&var).unwrap();
    var.set(&counted(5, 2)).unwrap();
    assert_eq!(values(&packet.into_tensor::<Tensor>().unwrap()), [1.0, 2.0]);
}

#[test]
fn what_is_sent_has_no_part_in_the_graph_of_the_sender() {
    let var = Var::from_tensor(&counted(0, 2)).unwrap();
    let output = (var.as_tensor() * 2.0).unwrap();
    let packet = Packet::of_tensor(&output).unwrap();
    let received: Tensor = packet.into_tensor().unwrap();
    let grads = received
        .sqr()
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert!(grads.get(&var).is_none());
}

#[test]
fn a_message_of_another_engine_becomes_a_tensor() {
    let packet = Packet {
        shape: vec![1, 2],
        data: Box::new(vec![1.0_f32, 2.0]),
    };
    let tensor: Tensor = packet.into_tensor().unwrap();
    assert_eq!(tensor.to_vec2::<f32>().unwrap(), [[1.0, 2.0]]);
    let wrong = Packet {
        shape: vec![3],
        data: Box::new(vec![1.0_f32, 2.0]),
    };
    let error = wrong.into_tensor::<Tensor>().unwrap_err().to_string();
    assert!(error.starts_with("a tensor of shape [3] cannot"), "{error}");
}

#[test]
fn a_pending_operation_has_the_tensor_until_it_is_waited_for() {
    let results = world(2, |member| {
        let group = member.world_group().unwrap();
        let own = counted(member.rank().0, 2);
        let pending = group
            .start_all_reduce(own.lend().unwrap(), ReduceOp::Sum)
            .unwrap();
        // An engine would wait for ever for the lock of a second one.
        let error = own.narrow(0, 1, 1).unwrap().lend().unwrap_err();
        assert!(
            error.to_string().contains("lent to another operation"),
            "{error}"
        );
        drop(pending.wait().unwrap());
        values(&own)
    });
    assert_eq!(results, [[3.0, 5.0]; 2]);
}

#[test]
fn a_failure_leaves_a_tensor_as_it_was() {
    world(2, |member| {
        let group = member.world_group().unwrap();
        let own = counted(member.rank().0, 2);
        // Both ranks have the group before one fails.
        if member.rank().0 == 1 {
            group.recv(0, 0).unwrap();
            group.abort("out of data");
        } else {
            group.send(1, 0, Vec::new()).unwrap();
        }
        let failed = group.all_reduce_tensor(&own, ReduceOp::Sum);
        assert!(failed.unwrap_err().to_string().contains("out of data"));
        assert_eq!(values(&own), values(&counted(member.rank().0, 2)));
    });
}

#[test]
fn a_tensor_that_cannot_be_lent_says_why() {
    let message = |tensor: &Tensor| tensor.lend().unwrap_err().to_string();
    let shorts = Tensor::zeros(2, CandleType::I16, &Device::Cpu).unwrap();
    assert_eq!(
        message(&shorts),
        "a tensor of shape [2] cannot be used here: its elements are I16, expected one of f64, \
         f32, bf16, f16, i64, u32, u8"
    );
    let repeated = counted(0, 1).broadcast_as((2, 1)).unwrap();
    assert!(
        message(&repeated).contains("repeated elements"),
        "{}",
        message(&repeated)
    );
    let results = world(2, |member| {
        let group = member.world_group().unwrap();
        group.all_to_all_tensor(&counted(0, (3, 2))).unwrap_err()
    });
    assert_eq!(
        results[0].to_string(),
        "a tensor of shape [3, 2] cannot be used here: its first dim cannot be cut into 2 equal \
         parts"
    );
}

#[test]
fn an_empty_tensor_is_reduced() {
    world(2, |member| {
        let group = member.world_group().unwrap();
        let own = counted(0, (0, 2));
        group.all_reduce_tensor(&own, ReduceOp::Sum).unwrap();
        assert_eq!(group.all_gather_tensor(&own).unwrap().dims(), [0, 2]);
    });
}

#[test]
fn a_buffer_of_a_tensor_writes_under_its_lock() {
    let own = counted(0, 2);
    let mut buffer = TensorBuffer::new(&own).unwrap();
    buffer.clear();
    assert_eq!(values(&own), [0.0, 0.0]);
    let copy = into_vec::<f32>(Box::new(buffer)).unwrap();
    assert_eq!(copy, [0.0, 0.0]);
}

#[test]
fn variables_come_in_the_order_of_their_names() {
    let names = ["b", "a", "c"];
    let var = |name: &str| (name.to_owned(), Var::from_tensor(&counted(0, 1)).unwrap());
    let vars = Mutex::new(names.map(var).into());
    assert!(vars_by_name(&vars).keys().eq(["a", "b", "c"]));
}
