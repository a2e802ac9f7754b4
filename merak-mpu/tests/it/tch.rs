use crate::tensors::{Library, counted, laws, tensor, values};
use merak_mpu::{
    DType, HostTensor, Memory, Packet, ReduceOp,
    tch::{dtype_of, kind_of, reason_of, vars_by_name},
    testing::world,
};
use tch::{Device, Kind, Tensor, nn::VarStore};

impl Library for Tensor {
    const HAS_U32: bool = false;

    fn part(&self, dim: usize, start: usize, len: usize) -> Self {
        let [dim, start, len] =
            [dim, start, len].map(|n| i64::try_from(n).expect("a size of a test"));
        self.narrow(dim, start, len)
    }

    fn transposed(&self) -> Self {
        self.tr()
    }

    fn repeated(&self) -> Self {
        self.expand([2, 1], false)
    }
}

laws!(Tensor);

fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

#[test]
fn the_element_types_have_libtorchs_names() {
    for dtype in DType::ALL {
        let expected = (dtype != DType::U32).then_some(dtype);
        assert_eq!(kind_of(dtype).and_then(dtype_of), expected);
    }
    assert_eq!(dtype_of(Kind::Bool), None);
    let error = Tensor::from_buffer(&[1], Box::new(vec![1_u32])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a tensor of shape [1] cannot be used here: libtorch has no elements of u32"
    );
}

#[test]
fn a_variable_is_reduced_in_place_and_still_takes_a_gradient() {
    let found = world(2, |member| {
        let group = member.world_group().unwrap();
        let var = floats(&[1.0, 2.0]).set_requires_grad(true);
        group.all_reduce_tensor(&var, ReduceOp::Sum).unwrap();
        (&var * &var).sum(Kind::Float).backward();
        (values(&var), values(&var.grad()))
    });
    assert_eq!(found[0], (vec![2.0, 4.0], vec![4.0, 8.0]));
}

#[test]
fn a_variable_is_sent_as_the_copy_that_no_step_changes() {
    let mut var = floats(&[1.0, 2.0]).set_requires_grad(true);
    let packet = Packet::of_tensor(&var).unwrap();
    tch::no_grad(|| var.copy_(&floats(&[5.0, 6.0])));
    let sent: Tensor = packet.into_tensor().unwrap();
    assert_eq!(
        (values(&sent), sent.requires_grad()),
        (vec![1.0, 2.0], false)
    );
}

#[test]
fn what_is_sent_has_no_part_in_the_graph_of_the_sender() {
    let var = floats(&[1.0, 2.0]).set_requires_grad(true);
    let output = &var * 2.0;
    let received: Tensor = Packet::of_tensor(&output).unwrap().into_tensor().unwrap();
    assert_eq!(received.data_ptr(), output.data_ptr(), "no copy");
    let received = received.set_requires_grad(true);
    (&received * &received).sum(Kind::Float).backward();
    assert!(received.grad().defined() && !var.grad().defined());
}

#[test]
fn what_a_collective_makes_is_a_tensor_without_a_copy() {
    let own = floats(&[1.0]);
    let mut made = own.lend().unwrap().zeros_like(3);
    let Memory::Host(place) = made.memory() else {
        unreachable!("the tensor is on the CPU");
    };
    let tensor = Tensor::from_buffer(&[3], made).unwrap();
    assert_eq!(tensor.data_ptr().cast(), place);
}

#[test]
fn every_view_without_a_repeated_element_is_written_where_it_lies() {
    let whole = Tensor::zeros([4, 5, 6], (Kind::BFloat16, Device::Cpu));
    let views = [
        whole.permute([2, 0, 1]),
        whole.slice(1, 1, 5, 3).transpose(0, 2),
        whole.select(2, 3).diagonal(0, 0, 1),
        whole.unsqueeze(1).narrow(3, 2, 1),
        // A size of 1 has any stride.
        whole.as_strided([2, 1, 3], [30, 0, 2], 1),
    ];
    for view in views {
        let _ = whole.shallow_clone().zero_();
        let mut buffer = view.lend().unwrap();
        assert_eq!((buffer.dtype(), buffer.len()), (DType::BF16, view.numel()));
        let one = half::bf16::from_f32(1.0);
        buffer.write(&mut |bytes| bytemuck::cast_slice_mut(bytes).fill(one));
        drop(buffer);
        let ones = [&view, &whole].map(|tensor| tensor.sum(Kind::Int64).int64_value(&[]));
        let expected = i64::try_from(view.numel()).unwrap();
        assert_eq!(ones, [expected; 2], "{:?}", view.stride());
    }
}

#[test]
fn the_imaginary_part_of_a_conjugate_is_read_and_written_as_what_it_is() {
    // Its memory holds the negatives of its elements.
    let whole = Tensor::complex(&floats(&[1.0, 2.0]), &floats(&[3.0, 4.0]));
    let view = whole.conj().imag();
    assert_eq!(values(&view), [-3.0, -4.0]);
    let mut buffer = view.lend().unwrap();
    buffer.write(&mut |bytes| bytemuck::cast_slice_mut(bytes).fill(7.0_f32));
    drop(buffer);
    assert_eq!(values(&whole.imag()), [-7.0, -7.0]);
}

#[test]
fn a_tensor_that_cannot_be_lent_says_why() {
    let refused = |tensor: &Tensor| {
        let messages = [tensor.lend(), tensor.share()].map(|made| made.unwrap_err().to_string());
        assert_eq!(messages[0], messages[1]);
        let start = format!(
            "a tensor of shape {:?} cannot be used here: ",
            tensor.sizes()
        );
        let reason = messages[0].strip_prefix(&start);
        reason.expect("the shape comes first").to_owned()
    };
    let shorts = Tensor::zeros([2], (Kind::Int16, Device::Cpu));
    let expected = "expected one of f64, f32, bf16, f16, i64, u32, u8";
    assert_eq!(
        refused(&shorts),
        format!("its elements are Int16, {expected}")
    );
    assert_eq!(refused(&Tensor::new()), "it is undefined");
    let sparse =
        refused(&tensor::<Tensor, f32>(&[1.0, 0.0], &[1, 2]).to_sparse(None, None::<i64>, None));
    assert!(
        !sparse.contains('\n') && !sparse.contains("Exception"),
        "{sparse}"
    );
    let windows = floats(&[1.0, 2.0, 3.0, 4.0]).unfold(0, 3, 1);
    assert!(windows.share().is_ok());
    let error = windows.lend().unwrap_err().to_string();
    assert!(
        error.ends_with("share memory, as after a broadcast: copy it first"),
        "{error}"
    );
}

#[test]
fn an_error_of_libtorch_is_one_line() {
    let error = floats(&[1.0]).f_reshape([2]).unwrap_err();
    assert_eq!(
        reason_of(&error),
        "shape '[2]' is invalid for input of size 1"
    );
}

#[test]
fn variables_come_in_the_order_of_their_names_and_are_those_of_the_store() {
    let store = VarStore::new(Device::Cpu);
    for name in ["b", "a", "c"] {
        let _ = store.root().zeros(name, &[2]);
    }
    let _ = store.root().zeros_no_train("mean", &[2]);
    let vars = vars_by_name(&store);
    assert!(vars.keys().eq(["a", "b", "c", "mean"]));
    assert!(vars["a"].requires_grad() && !vars["mean"].requires_grad());
    vars["a"]
        .lend()
        .unwrap()
        .write(&mut |bytes| bytes.fill(0xff));
    let own = store.root().get("a").unwrap();
    assert_eq!(values(&counted::<Tensor>(0, &[1])), [1.0]);
    assert!(values(&own).iter().all(|value| value.is_nan()));
}
