//! Kernels of ATen that the tch crate does not bind.
#![expect(unsafe_code, reason = "calls into C++")]

use super::optimizer::AdamScalars;
use crate::{Error, Result};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::{Mutex, Once, OnceLock, PoisonError},
};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

unsafe extern "C" {
    fn merak_tch_free(message: *mut c_char);
    fn merak_tch_load_cuda() -> *mut c_char;
    fn merak_tch_pool_memory();
    fn merak_tch_current_stream(device: c_int, stream: *mut u64) -> *mut c_char;
    fn merak_tch_peak_bytes(device: c_int, bytes: *mut u64) -> *mut c_char;
    fn merak_tch_layer_norm_backward(
        grad: *const C_tensor,
        input: *const C_tensor,
        mean: *const C_tensor,
        rstd: *const C_tensor,
        weight: *const C_tensor,
        of_input: bool,
        out: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn merak_tch_add_product(
        a: *const C_tensor,
        b: *const C_tensor,
        c: *mut C_tensor,
        done: *mut bool,
    ) -> *mut c_char;
    fn merak_tch_for_each(
        count: usize,
        body: unsafe extern "C" fn(*const c_void, usize),
        context: *const c_void,
    ) -> *mut c_char;
    fn merak_tch_adam(
        tensors: *const *const C_tensor,
        count: usize,
        lr: f64,
        beta1: f64,
        beta2: f64,
        epsilon: f64,
        weight_decay: f64,
        decoupled: bool,
        time: f64,
        grad_scale: f64,
    ) -> *mut c_char;
    fn merak_tch_flash_attention(
        q: *const C_tensor,
        k: *const C_tensor,
        v: *const C_tensor,
        causal: bool,
        scale: f64,
        out: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// Makes libtorch keep freed memory of large tensors on the processor for the next ones of their
/// size.
pub(super) fn pool_memory() {
    static ONCE: Once = Once::new();
    // SAFETY: the function takes nothing; its allocator lives as long as the process, and tensors
    // from before are still freed by theirs.
    ONCE.call_once(|| unsafe { merak_tch_pool_memory() });
}

/// Loads the half of libtorch that holds the kernels for CUDA, which from then on give the same
/// bits each time.
pub(super) fn load_cuda() -> Result<(), String> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    let load = || {
        // SAFETY: the function takes nothing and returns null or a message of its own. It runs once
        // and sets flags before a kernel of a device can run; what this backend calls on the
        // processor computes alike under them.
        let message = unsafe { merak_tch_load_cuda() };
        message_of(message).map_or(Ok(()), Err)
    };
    LOADED.get_or_init(load).clone()
}

/// The queue of a CUDA device into which this thread puts its kernels, as CUDA's `CUstream`; none
/// where libtorch has no such device.
pub(super) fn current_stream(device: usize) -> Option<u64> {
    let mut stream = 0;
    let device = c_int::try_from(device).ok()?;
    // SAFETY: the function writes one number there, and returns null or a message of its own.
    let message = unsafe { merak_tch_current_stream(device, &raw mut stream) };
    message_of(message).is_none().then_some(stream)
}

/// The most bytes that tensors took at once on a CUDA device; none where none has lain on any.
pub(super) fn peak_bytes(device: usize) -> Option<u64> {
    let mut bytes = 0;
    let device = c_int::try_from(device).ok()?;
    // SAFETY: the function writes one number there, and returns null or a message of its own.
    let message = unsafe { merak_tch_peak_bytes(device, &raw mut bytes) };
    message_of(message).is_none().then_some(bytes)
}

/// Operands of the backward of a layer norm, over rows of the last dimension.
#[derive(Debug)]
pub(super) struct LayerNorm<'a> {
    /// `[.., n]`, the gradient of the result.
    pub(super) grad: &'a Tensor,
    /// `[.., n]`.
    pub(super) input: &'a Tensor,
    /// `[.., 1]`.
    pub(super) mean: &'a Tensor,
    /// `[.., 1]`.
    pub(super) rstd: &'a Tensor,
    /// `[n]`.
    pub(super) weight: &'a Tensor,
}

impl LayerNorm<'_> {
    /// The gradient of the input.
    pub(super) fn of_input(&self, node: &str) -> Result<Tensor> {
        let [dx, _, _] = self.backward(node, true)?;
        dx.ok_or_else(|| nothing(node))
    }

    /// The gradients of the weight and the bias.
    pub(super) fn of_params(&self, node: &str) -> Result<[Tensor; 2]> {
        let [_, dw, db] = self.backward(node, false)?;
        dw.zip(db).map(Into::into).ok_or_else(|| nothing(node))
    }

    fn backward(&self, node: &str, of_input: bool) -> Result<[Option<Tensor>; 3]> {
        let mut out = [std::ptr::null_mut(); 3];
        // SAFETY: all operands are live tensors, and `out` has room for the three results.
        let message = unsafe {
            merak_tch_layer_norm_backward(
                self.grad.as_ptr(),
                self.input.as_ptr(),
                self.mean.as_ptr(),
                self.rstd.as_ptr(),
                self.weight.as_ptr(),
                of_input,
                out.as_mut_ptr(),
            )
        };
        adopted(node, message, out)
    }
}

/// FlashAttention-2 on a CUDA device: `q, k, v [B, H, S, D] -> out [B, H, Sq, D], lse [B, H, Sq]`.
/// Its backward is one that the tch crate binds.
pub(super) fn flash_attention(
    node: &str,
    [q, k, v]: [&Tensor; 3],
    causal: bool,
    scale: f64,
) -> Result<(Tensor, Tensor)> {
    let mut out = [std::ptr::null_mut(); 2];
    // SAFETY: all operands are live tensors, and `out` has room for the two results.
    let message = unsafe {
        merak_tch_flash_attention(
            q.as_ptr(),
            k.as_ptr(),
            v.as_ptr(),
            causal,
            scale,
            out.as_mut_ptr(),
        )
    };
    let [out, lse] = adopted(node, message, out)?;
    out.zip(lse).ok_or_else(|| nothing(node))
}

/// Adds `a^T b` to `sum [M, N]` in f32, for `a [K, M]` and `b [K, N]` of bf16; false where libtorch
/// has no kernel for it.
pub(super) fn add_product(node: &str, a: &Tensor, b: &Tensor, sum: &mut Tensor) -> Result<bool> {
    let is_plain = |x: &Tensor, kind| {
        x.kind() == kind && x.device() == Device::Cpu && x.is_contiguous() && x.dim() == 2
    };
    assert!(
        is_plain(a, Kind::BFloat16) && is_plain(b, Kind::BFloat16) && is_plain(sum, Kind::Float),
        "matrices of the kernel's types without gaps"
    );
    assert_eq!(
        (a.size()[0], vec![a.size()[1], b.size()[1]]),
        (b.size()[0], sum.size()),
        "sizes of a product"
    );
    let mut done = false;
    // SAFETY: the operands are live tensors of the types, sizes and layout that the kernel takes,
    // as checked above, and `done` is one flag.
    let message =
        unsafe { merak_tch_add_product(a.as_ptr(), b.as_ptr(), sum.as_mut_ptr(), &raw mut done) };
    adopted(node, message, []).map(|[]| done)
}

/// Calls `body` with each item and its number, on libtorch's threads.
pub(super) fn for_each_item<T: Send>(
    node: &str,
    items: Vec<T>,
    body: &(dyn Fn(usize, T) + Sync),
) -> Result<()> {
    let items: Vec<_> = items
        .into_iter()
        .map(|item| Mutex::new(Some(item)))
        .collect();
    for_each(node, items.len(), &|i| {
        let mut item = items[i].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(item) = item.take() {
            body(i, item);
        }
    })
}

/// Calls `body` for each number below `count`, on libtorch's threads.
fn for_each(node: &str, count: usize, body: &(dyn Fn(usize) + Sync)) -> Result<()> {
    unsafe extern "C" fn call(context: *const c_void, i: usize) {
        // SAFETY: `context` is `body` below, which outlives the calls.
        let body = unsafe { &*context.cast::<&(dyn Fn(usize) + Sync)>() };
        body(i);
    }
    let context = (&raw const body).cast();
    // SAFETY: the shim calls the function on threads that it waits for, with the context alone.
    let message = unsafe { merak_tch_for_each(count, call, context) };
    adopted(node, message, []).map(|[]| ())
}

/// A fused step on lists of parameters, gradients and both moments, all of one length.
pub(super) fn adam(step: &AdamScalars, lists: &[Vec<Tensor>; 4]) -> Result<()> {
    let count = lists[0].len();
    assert!(
        lists.iter().all(|list| list.len() == count),
        "one of each for every piece"
    );
    let tensors: Vec<_> = lists.iter().flatten().map(Tensor::as_ptr).collect();
    // SAFETY: `tensors` holds four times `count` live tensors.
    let message = unsafe {
        merak_tch_adam(
            tensors.as_ptr(),
            count,
            step.lr,
            step.betas[0],
            step.betas[1],
            step.epsilon,
            step.weight_decay,
            step.decoupled,
            step.time as f64,
            step.grad_scale,
        )
    };
    adopted("optimizer step", message, []).map(|[]| ())
}

/// Takes over the results of a kernel, or its message.
fn adopted<const N: usize>(
    node: &str,
    message: *mut c_char,
    out: [*mut C_tensor; N],
) -> Result<[Option<Tensor>; N]> {
    match message_of(message) {
        Some(reason) => Err(Error::backend(node, reason)),
        None => Ok(out.map(adopt)),
    }
}

fn nothing(node: &str) -> Error {
    Error::backend(node, "libtorch returned no tensor")
}

/// Takes over a tensor that the shim allocated.
fn adopt(tensor: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: a result that is not null was allocated for the caller, who gets it exactly once.
    (!tensor.is_null()).then(|| unsafe { Tensor::from_ptr(tensor) })
}

/// Takes over a message of the shim, if there is one.
fn message_of(message: *mut c_char) -> Option<String> {
    if message.is_null() {
        return None;
    }
    // SAFETY: the shim returns null or a string that ends in a zero byte.
    let text = unsafe { CStr::from_ptr(message) }
        .to_string_lossy()
        .into_owned();
    // SAFETY: the message is the shim's and is not used any more.
    unsafe { merak_tch_free(message) };
    Some(text)
}
