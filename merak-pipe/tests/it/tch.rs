//! Stages of a libtorch model.

use crate::tensors::{Library, laws};
use merak_pipe::{Autograd, BoxError};
use tch::{Kind, Tensor};

impl Library for Tensor {
    fn layer(x: &Self, weight: &Self, bias: &Self) -> Result<Self, BoxError> {
        Ok(x + x.f_matmul(weight)?.f_add(bias)?.f_tanh()?)
    }

    fn mean_of_squares(&self) -> Result<Self, BoxError> {
        Ok(self.f_square()?.f_mean(Kind::Double)?)
    }

    fn again(var: &Self) -> Self {
        var.shallow_clone()
    }
}

laws!(Tensor);

#[test]
fn gradients_are_those_of_the_variables_asked_for_and_their_own_stay_as_they_are() {
    let var = |value: f64| {
        let tensor = Tensor::from_slice(&[value]);
        tensor.into_variable().unwrap()
    };
    let [used, frozen, idle] = [2.0, 3.0, 5.0].map(var);
    let _ = frozen.set_requires_grad(false);
    let scalar = (&used * &used * &frozen).sum(Kind::Double);
    let of = |scalar: &Tensor, vars: &[&Tensor]| {
        let grads = scalar.gradients(vars).unwrap().into_iter();
        let grads = grads.map(|grad| grad.map(|grad| grad.elements().unwrap()));
        grads.collect::<Vec<_>>()
    };
    // No variable is none, and not all of the graph.
    assert_eq!(of(&scalar, &[&frozen]), [None]);
    assert_eq!(
        of(&scalar, &[&idle, &frozen, &used]),
        [None, None, Some(vec![12.0])]
    );
    assert_eq!(of(&frozen.sum(Kind::Double), &[&used]), [None]);
    assert!(!used.grad().defined() && !idle.grad().defined());
}

#[test]
fn an_error_of_libtorch_is_one_line() {
    let (two, three) = (Tensor::from_slice(&[1.0; 2]), Tensor::from_slice(&[1.0; 3]));
    let error = two.plus(&three).unwrap_err().to_string();
    assert!(
        error.starts_with("The size of tensor a (2) must match") && !error.contains('\n'),
        "{error}"
    );
}
