use crate::tensors::{Library, counted, laws, values};
use candle_core::{DType as CandleType, Device, Tensor, Var};
use merak_mpu::{
    Buffer, DType, HostTensor, Packet,
    candle::{TensorBuffer, dtype_of, vars_by_name},
    into_vec,
};
use std::sync::Mutex;

impl Library for Tensor {
    const HAS_U32: bool = true;

    fn part(&self, dim: usize, start: usize, len: usize) -> Self {
        self.narrow(dim, start, len)
            .expect("the numbers of a test fit")
    }

    fn transposed(&self) -> Self {
        self.t().expect("the numbers of a test fit")
    }

    fn repeated(&self) -> Self {
        self.broadcast_as((2, 1))
            .expect("the numbers of a test fit")
    }
}

laws!(Tensor);

fn var(start: usize) -> Var {
    Var::from_tensor(&counted(start, &[2])).expect("the numbers of a test fit")
}

#[test]
fn the_element_types_have_candles_names() {
    for dtype in DType::ALL {
        assert_eq!(dtype_of(dtype.into()), Some(dtype));
    }
    assert_eq!(dtype_of(CandleType::I16), None);
}

#[test]
fn a_variable_is_sent_as_the_copy_that_no_step_changes() {
    let var = var(0);
    let packet = Packet::of_tensor(&var).unwrap();
    var.set(&counted(5, &[2])).unwrap();
    assert_eq!(values(&packet.into_tensor::<Tensor>().unwrap()), [1.0, 2.0]);
}

#[test]
fn what_is_sent_has_no_part_in_the_graph_of_the_sender() {
    let var = var(0);
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
fn a_tensor_that_cannot_be_lent_says_why() {
    let message = |tensor: &Tensor| tensor.lend().unwrap_err().to_string();
    let shorts = Tensor::zeros(2, CandleType::I16, &Device::Cpu).unwrap();
    assert_eq!(
        message(&shorts),
        "a tensor of shape [2] cannot be used here: its elements are I16, expected one of f64, \
         f32, bf16, f16, i64, u32, u8"
    );
    let repeated = counted::<Tensor>(0, &[1]).repeated();
    assert!(
        message(&repeated).contains("repeated elements"),
        "{}",
        message(&repeated)
    );
}

#[test]
fn a_buffer_of_a_tensor_writes_under_its_lock() {
    let own: Tensor = counted(0, &[2]);
    let mut buffer = TensorBuffer::new(&own).unwrap();
    buffer.clear();
    assert_eq!(values(&own), [0.0, 0.0]);
    let copy = into_vec::<f32>(Box::new(buffer)).unwrap();
    assert_eq!(copy, [0.0, 0.0]);
}

#[test]
fn variables_come_in_the_order_of_their_names() {
    let names = ["b", "a", "c"];
    let vars = Mutex::new(names.map(|name| (name.to_owned(), var(0))).into());
    assert!(vars_by_name(&vars).keys().eq(["a", "b", "c"]));
}
