// Kernels of ATen that the tch crate does not bind, over libtorch's own headers.
//
// Every function returns null, or a message that `merak_tch_free` frees. Results are new tensors, which
// the caller owns.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/native_layer_norm_backward.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>

namespace {

template <typename F>
char* guarded(F body) {
    try {
        body();
        return nullptr;
    } catch (const c10::Error& error) {
        return strdup(error.what_without_backtrace());
    } catch (const std::exception& error) {
        return strdup(error.what());
    } catch (...) {
        return strdup("unknown C++ exception");
    }
}

at::Tensor* owned(at::Tensor tensor) {
    return tensor.defined() ? new at::Tensor(std::move(tensor)) : nullptr;
}

} // namespace

extern "C" {

void merak_tch_free(char* message) {
    std::free(message);
}

// Loads the CUDA half of libtorch, which nothing links to, so that its kernels register themselves.
char* merak_tch_load_cuda() {
    return dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) ? nullptr : strdup(dlerror());
}

// grad, input: [.., n]; mean, rstd: [.., 1]; weight: [n]. Writes dx, or dw and db: null where not asked for.
char* merak_tch_layer_norm_backward(
    const at::Tensor* grad,
    const at::Tensor* input,
    const at::Tensor* mean,
    const at::Tensor* rstd,
    const at::Tensor* weight,
    bool of_input,
    at::Tensor** out) {
    return guarded([&] {
        const std::array<int64_t, 1> shape{input->size(-1)};
        const std::array<bool, 3> mask{of_input, !of_input, !of_input};
        auto grads = at::native_layer_norm_backward(
            *grad, *input, shape, *mean, *rstd, *weight, *weight, mask);
        out[0] = owned(std::get<0>(grads));
        out[1] = owned(std::get<1>(grads));
        out[2] = owned(std::get<2>(grads));
    });
}

// q, k, v: [B, H, S, D] on a CUDA device. Writes out and lse [B, H, Sq].
char* merak_tch_flash_attention(
    const at::Tensor* q,
    const at::Tensor* k,
    const at::Tensor* v,
    bool causal,
    double scale,
    at::Tensor** out) {
    return guarded([&] {
        auto results = at::_scaled_dot_product_flash_attention(
            *q, *k, *v, /*dropout_p=*/0.0, causal, /*return_debug_mask=*/false, scale);
        out[0] = owned(std::get<0>(results));
        out[1] = owned(std::get<1>(results));
    });
}

} // extern "C"
