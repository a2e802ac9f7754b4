// Kernels of ATen that the tch crate does not bind, over libtorch's own headers.
//
// Every function returns null, or a message that `merak_tch_free` frees. Results are new tensors,
// which the caller owns.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <vector>

// Of MKL, which libtorch for x86-64 holds: c = alpha op(a) op(b) + beta c.
extern "C" __attribute__((weak)) void cblas_gemm_bf16bf16f32(
    int layout, int trans_a, int trans_b, int m, int n, int k, float alpha,
    const void* a, int lda, const void* b, int ldb, float beta, float* c, int ldc);

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
// Sums of its kernels then have one order: FlashAttention-2's backward adds by atomics otherwise.
// That mode also writes to all new memory, which no kernel here reads before it is written.
char* merak_tch_load_cuda() {
    if (!dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL)) {
        return strdup(dlerror());
    }
    return guarded([] {
        at::Context& context = at::globalContext();
        context.setDeterministicFillUninitializedMemory(false);
        context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    });
}

// Writes the queue of a CUDA device, as a CUstream, into which the calling thread puts its kernels.
char* merak_tch_current_stream(int device, uint64_t* stream) {
    return guarded([&] {
        const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
        const c10::Device place(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
        void* handle = guard.getStreamNativeHandle(guard.getStream(place));
        *stream = reinterpret_cast<uintptr_t>(handle);
    });
}

// Writes the most bytes that tensors of this process took at once on a CUDA device.
char* merak_tch_peak_bytes(int device, uint64_t* bytes) {
    return guarded([&] {
        auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
        const auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(device));
        const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
        *bytes = static_cast<uint64_t>(stats.allocated_bytes[all].peak);
    });
}

// grad, input: [.., n]; mean, rstd: [.., 1]; weight: [n]. Writes dx, or dw and db: null where not
// asked for.
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

// Adds a^T b to c, where a [k, m] and b [k, n] are bf16 and c [m, n] is f32, all without gaps in
// host memory. Writes whether there is a kernel for it.
char* merak_tch_add_product(
    const at::Tensor* a, const at::Tensor* b, at::Tensor* c, bool* done) {
    return guarded([&] {
        const int64_t m = a->size(1), n = b->size(1), k = a->size(0);
        const int64_t largest = std::max({m, n, k});
        *done = cblas_gemm_bf16bf16f32 != nullptr && largest <= INT_MAX && m > 0 && n > 0 && k > 0;
        if (*done) {
            const int row_major = 101, plain = 111, transposed = 112;
            const auto size = [](int64_t x) { return static_cast<int>(x); };
            cblas_gemm_bf16bf16f32(row_major, transposed, plain, size(m), size(n), size(k), 1.0f,
                a->const_data_ptr(), size(m), b->const_data_ptr(), size(n), 1.0f,
                c->data_ptr<float>(), size(n));
        }
    });
}

// Calls the function with the context for each number below `count`, on libtorch's threads.
char* merak_tch_for_each(size_t count, void (*body)(const void*, size_t), const void* context) {
    return guarded([&] {
        at::parallel_for(0, static_cast<int64_t>(count), 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                body(context, static_cast<size_t>(i));
            }
        });
    });
}

// A step of Adam or AdamW on lists of `count` parameters, gradients and first and second moments,
// in this order.
char* merak_tch_adam(
    const at::Tensor* const* tensors,
    size_t count,
    double lr,
    double beta1,
    double beta2,
    double epsilon,
    double weight_decay,
    bool decoupled,
    double time,
    double grad_scale) {
    return guarded([&] {
        if (count == 0) {
            return;
        }
        std::array<std::vector<at::Tensor>, 4> lists;
        for (size_t list = 0; list < lists.size(); ++list) {
            for (size_t i = 0; i < count; ++i) {
                lists[list].push_back(*tensors[list * count + i]);
            }
        }
        auto& [params, grads, exp_avgs, exp_avg_sqs] = lists;
        const auto scalar = [&](double value) {
            return at::full({}, value, params[0].options());
        };
        const std::vector<at::Tensor> steps(count, scalar(time));
        std::optional<at::Tensor> divisor;
        if (grad_scale != 1.0) {
            divisor = scalar(1.0 / grad_scale);
        }
        if (decoupled) {
            at::_fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, {}, steps, lr, beta1, beta2,
                weight_decay, epsilon, /*amsgrad=*/false, /*maximize=*/false, divisor);
        } else {
            at::_fused_adam_(params, grads, exp_avgs, exp_avg_sqs, {}, steps, lr, beta1, beta2,
                weight_decay, epsilon, /*amsgrad=*/false, /*maximize=*/false, divisor);
        }
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
