//! What tensors of every library do in collectives and messages.

use half::{bf16, f16};
use merak_mpu::{
    Buffer, Communicator, Element, Error, HostTensor, Packet, ReduceOp, into_vec, testing::world,
};

/// A tensor library under test.
pub(crate) trait Library: HostTensor + 'static {
    /// Whether it has tensors of `u32`.
    const HAS_U32: bool;

    /// Part of a dim, over the same memory.
    fn part(&self, dim: usize, start: usize, len: usize) -> Self;

    /// Both dims in the other order, over the same memory.
    fn transposed(&self) -> Self;

    /// One element at every place of `[2, 1]`, over the same memory.
    fn repeated(&self) -> Self;
}

/// Makes a test of every law here for a library.
macro_rules! laws {
    ($tensor:ty: $($law:ident)*) => {
        $(#[test]
        fn $law() {
            $crate::tensors::$law::<$tensor>();
        })*
    };
    ($tensor:ty) => {
        $crate::tensors::laws!($tensor:
            a_contiguous_tensor_is_reduced_where_it_lies
            a_strided_tensor_gets_the_sum_in_its_own_places
            every_collective_works_along_the_first_dim
            a_group_of_one_gives_each_tensor_back
            every_element_type_is_summed
            a_message_between_threads_moves_no_element
            a_message_of_another_engine_becomes_a_tensor
            what_was_lent_or_shared_becomes_a_tensor_over_the_same_memory
            two_tensors_of_one_storage_are_not_lent_at_once
            a_pending_operation_has_the_tensor_until_it_is_waited_for
            a_failure_leaves_a_tensor_as_it_was
            elements_at_one_place_are_not_lent
            a_tensor_that_cannot_be_cut_says_why
            an_empty_tensor_is_reduced
        );
    };
}
pub(crate) use laws;

pub(crate) fn tensor<T: HostTensor, E: Element>(values: &[E], sizes: &[usize]) -> T {
    T::from_buffer(sizes, Box::new(values.to_vec())).expect("the numbers of a test fit")
}

/// Rank `r` has `r + 1, r + 2, ..`.
pub(crate) fn counted<T: HostTensor>(rank: usize, sizes: &[usize]) -> T {
    let values = (0..sizes.iter().product()).map(|i: usize| (rank + 1 + i) as f32);
    tensor(&values.collect::<Vec<_>>(), sizes)
}

pub(crate) fn values<T: HostTensor>(tensor: &T) -> Vec<f32> {
    elements(tensor)
}

fn elements<T: HostTensor, E: Element>(tensor: &T) -> Vec<E> {
    let buffer = tensor.share().expect("the numbers of a test fit");
    into_vec(buffer).expect("the numbers of a test fit")
}

fn place<T: HostTensor>(tensor: &T) -> usize {
    let buffer = tensor.share().expect("the numbers of a test fit");
    place_of(&*buffer)
}

fn place_of(buffer: &dyn Buffer) -> usize {
    let mut place = 0;
    buffer.read(&mut |bytes| place = bytes.as_ptr().addr());
    place
}

pub(crate) fn a_contiguous_tensor_is_reduced_where_it_lies<T: Library>() {
    let results = world(2, |member| {
        let group = member.world_group().unwrap();
        let whole: T = counted(member.rank().0, &[3, 2]);
        let rows = whole.part(0, 1, 2);
        let before = place(&rows);
        group.all_reduce_tensor(&rows, ReduceOp::Sum).unwrap();
        assert_eq!(place(&rows), before);
        values(&whole)
    });
    // The first row is no part of the sum.
    assert_eq!(results[0], [1.0, 2.0, 7.0, 9.0, 11.0, 13.0]);
    assert_eq!(results[1], [2.0, 3.0, 7.0, 9.0, 11.0, 13.0]);
}

pub(crate) fn a_strided_tensor_gets_the_sum_in_its_own_places<T: Library>() {
    let results = world(2, |member| {
        let group = member.world_group().unwrap();
        let whole: T = counted(member.rank().0, &[2, 3]);
        let column = whole.part(1, 1, 1);
        group.all_reduce_tensor(&column, ReduceOp::Max).unwrap();
        values(&whole)
    });
    assert_eq!(results[0], [1.0, 3.0, 3.0, 4.0, 6.0, 6.0]);
    assert_eq!(results[1], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
}

pub(crate) fn every_collective_works_along_the_first_dim<T: Library>() {
    let results = world(2, |member| {
        let (group, rank) = (member.world_group().unwrap(), member.rank().0);
        let own = || counted::<T>(10 * rank, &[2, 2]);
        let gathered = group.all_gather_tensor(&own()).unwrap();
        let scattered = group.reduce_scatter_tensor(&own(), ReduceOp::Sum).unwrap();
        let (exchanged, copied) = (own(), own());
        group.all_to_all_tensor(&exchanged).unwrap();
        group.broadcast_tensor(&copied, 1).unwrap();
        let scalar = group.all_gather_tensor(&tensor::<T, f32>(&[rank as f32], &[]));
        assert_eq!(gathered.sizes(), [4, 2]);
        assert_eq!(scattered.sizes(), [1, 2]);
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

pub(crate) fn a_group_of_one_gives_each_tensor_back<T: Library>() {
    world(1, |member| {
        let group = member.world_group().unwrap();
        let own: T = counted(0, &[2, 2]);
        let strided = own.transposed();
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

pub(crate) fn every_element_type_is_summed<T: Library>() {
    fn check<T: Library, E: Element + PartialEq>(one: E, two: E) {
        let sums = world(2, |member| {
            let own: T = tensor(&[one, two], &[2]);
            let group = member.world_group().unwrap();
            group.all_reduce_tensor(&own, ReduceOp::Sum).unwrap();
            elements::<T, E>(&own)[0]
        });
        assert_eq!(sums, [two; 2], "{}", E::DTYPE);
    }
    check::<T, _>(1.0_f64, 2.0);
    check::<T, _>(1.0_f32, 2.0);
    check::<T, _>(bf16::from_f32(1.0), bf16::from_f32(2.0));
    check::<T, _>(f16::from_f32(1.0), f16::from_f32(2.0));
    check::<T, _>(1_i64, 2);
    check::<T, _>(1_u8, 2);
    if T::HAS_U32 {
        check::<T, _>(1_u32, 2);
    }
}

pub(crate) fn a_message_between_threads_moves_no_element<T: Library>() {
    let places = world(2, |member| {
        let group = member.world_group().unwrap();
        if member.rank().0 == 0 {
            let own: T = counted(3, &[2, 3]);
            group.send_tensor(1, 7, &own).unwrap();
            group.barrier().unwrap();
            return place(&own);
        }
        let received: T = group.recv_tensor(0, 7).unwrap();
        let found = (received.sizes(), values(&received)[0]);
        assert_eq!(found, (vec![2, 3], 4.0));
        group.barrier().unwrap();
        place(&received)
    });
    assert_eq!(places[0], places[1]);
}

pub(crate) fn a_message_of_another_engine_becomes_a_tensor<T: Library>() {
    let packet = |shape: &[usize]| Packet {
        shape: shape.to_vec(),
        data: Box::new(vec![1.0_f32, 2.0]),
    };
    let tensor: T = packet(&[1, 2]).into_tensor().unwrap();
    assert_eq!(
        (tensor.sizes(), values(&tensor)),
        (vec![1, 2], vec![1.0, 2.0])
    );
    for wrong in [&[3][..], &[1, 1], &[usize::MAX, usize::MAX]] {
        let error = packet(wrong).into_tensor::<T>().err().unwrap();
        let start = format!("a tensor of shape {wrong:?} cannot");
        assert!(error.to_string().starts_with(&start), "{error}");
    }
}

pub(crate) fn what_was_lent_or_shared_becomes_a_tensor_over_the_same_memory<T: Library>() {
    let own: T = counted(0, &[2, 3]);
    for buffer in [own.lend().unwrap(), own.share().unwrap()] {
        let again = T::from_buffer(&[3, 2], buffer).unwrap();
        assert_eq!(
            (again.sizes(), place(&again)),
            (vec![3, 2], place(&own)),
            "no copy"
        );
    }
}

pub(crate) fn two_tensors_of_one_storage_are_not_lent_at_once<T: Library>() {
    let refused = |tensor: &T| {
        let error = tensor.lend().expect_err("its storage is lent");
        matches!(&error, Error::BadTensor { reason, .. } if reason.contains("lent to another"))
    };
    let whole: T = counted(0, &[2, 3]);
    // Parts without a common element, one of them strided.
    let (row, column) = (whole.part(0, 1, 1), whole.part(1, 2, 1));
    let mut lent = row.lend().unwrap();
    lent.clear();
    assert!(refused(&column) && refused(&whole) && refused(&row));
    drop(lent);
    column.lend().unwrap().clear();
    assert_eq!(values(&whole), [1.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
}

pub(crate) fn a_pending_operation_has_the_tensor_until_it_is_waited_for<T: Library>() {
    let results = world(2, |member| {
        let group = member.world_group().unwrap();
        let own: T = counted(member.rank().0, &[2]);
        let pending = group
            .start_all_reduce(own.lend().unwrap(), ReduceOp::Sum)
            .unwrap();
        let error = own.part(0, 1, 1).lend().unwrap_err();
        assert!(
            error.to_string().contains("lent to another operation"),
            "{error}"
        );
        drop(pending.wait().unwrap());
        values(&own)
    });
    assert_eq!(results, [[3.0, 5.0]; 2]);
}

pub(crate) fn a_failure_leaves_a_tensor_as_it_was<T: Library>() {
    world(2, |member| {
        let group = member.world_group().unwrap();
        let own: T = counted(member.rank().0, &[2]);
        // Both ranks have the group before one fails.
        if member.rank().0 == 1 {
            group.recv(0, 0).unwrap();
            group.abort("out of data");
        } else {
            group.send(1, 0, Vec::new()).unwrap();
        }
        let failed = group.all_reduce_tensor(&own, ReduceOp::Sum);
        assert!(failed.unwrap_err().to_string().contains("out of data"));
        let before: T = counted(member.rank().0, &[2]);
        assert_eq!(values(&own), values(&before));
    });
}

pub(crate) fn elements_at_one_place_are_not_lent<T: Library>() {
    let repeated = counted::<T>(0, &[1]).repeated();
    assert_eq!(values(&repeated), [1.0, 1.0]);
    assert!(matches!(repeated.lend(), Err(Error::BadTensor { .. })));
}

pub(crate) fn a_tensor_that_cannot_be_cut_says_why<T: Library>() {
    let results = world(2, |member| {
        let group = member.world_group().unwrap();
        let own: T = counted(0, &[3, 2]);
        group.all_to_all_tensor(&own).unwrap_err()
    });
    assert_eq!(
        results[0].to_string(),
        "a tensor of shape [3, 2] cannot be used here: its first dim cannot be cut into 2 equal \
         parts"
    );
}

pub(crate) fn an_empty_tensor_is_reduced<T: Library>() {
    world(2, |member| {
        let group = member.world_group().unwrap();
        let own: T = counted(0, &[0, 2]);
        group.all_reduce_tensor(&own, ReduceOp::Sum).unwrap();
        assert_eq!(group.all_gather_tensor(&own).unwrap().sizes(), [0, 2]);
        // Empty tensors have no memory that two could share.
        let both = (own.lend(), own.part(0, 0, 0).lend());
        assert!(both.0.is_ok() && both.1.is_ok());
    });
}
