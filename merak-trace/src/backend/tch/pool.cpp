// Memory of large tensors on the processor is kept when they are freed, and handed out again.
//
// A training step makes tensors of the same sizes over and over. Without this each of them is
// mapped, cleared page by page and unmapped by the operating system, which costs as much as much of
// the arithmetic.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace {

// Smaller ones are left to malloc.
constexpr size_t SMALLEST = 64 * 1024;

// The size in the header of what is not kept.
constexpr size_t UNKEPT = 0;

// In front of the data, which stay aligned for every vector instruction.
constexpr size_t HEADER = 64;

class Pool final : public c10::Allocator {
public:
    c10::DataPtr allocate(size_t bytes) override {
        void* data = bytes == 0 ? nullptr : allocate_data(bytes);
        return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override {
        return &give_back;
    }

    void copy_data(void* to, const void* from, size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }

    static Pool& instance() {
        // Never destroyed: tensors of other threads may outlive any static.
        static Pool* pool = new Pool();
        return *pool;
    }

private:
    void* allocate_data(size_t bytes) {
        const size_t size = bytes < SMALLEST ? UNKEPT : size_class(bytes);
        void* block = size == UNKEPT ? nullptr : take(size);
        if (block == nullptr) {
            block = c10::alloc_cpu(HEADER + (size == UNKEPT ? bytes : size));
            *static_cast<size_t*>(block) = size;
        }
        return static_cast<char*>(block) + HEADER;
    }

    // Eight sizes per power of two, so that at most an eighth is wasted.
    static size_t size_class(size_t bytes) {
        size_t step = SMALLEST / 8;
        while (step * 16 <= bytes) {
            step *= 2;
        }
        return (bytes + step - 1) / step * step;
    }

    static void give_back(void* data) {
        if (data == nullptr) {
            return;
        }
        void* block = static_cast<char*>(data) - HEADER;
        const size_t size = *static_cast<size_t*>(block);
        if (size == UNKEPT) {
            c10::free_cpu(block);
        } else {
            instance().keep(block, size);
        }
    }

    void* take(size_t size) {
        std::lock_guard<std::mutex> lock(mutex_);
        live_ += size;
        peak_ = std::max(peak_, live_);
        Shelf& shelf = shelves_[size];
        shelf.last_use = ++uses_;
        if (shelf.blocks.empty()) {
            return nullptr;
        }
        void* block = shelf.blocks.back();
        shelf.blocks.pop_back();
        kept_ -= size;
        return block;
    }

    void keep(void* block, size_t size) {
        std::lock_guard<std::mutex> lock(mutex_);
        live_ -= size;
        kept_ += size;
        shelves_[size].blocks.push_back(block);
        // A quarter more than was ever in use at once: sizes peak at different times.
        while (live_ + kept_ > peak_ + peak_ / 4) {
            free_longest_unused();
        }
    }

    void free_longest_unused() {
        auto oldest = shelves_.end();
        for (auto shelf = shelves_.begin(); shelf != shelves_.end(); ++shelf) {
            const bool is_older =
                oldest == shelves_.end() || shelf->second.last_use < oldest->second.last_use;
            if (!shelf->second.blocks.empty() && is_older) {
                oldest = shelf;
            }
        }
        c10::free_cpu(oldest->second.blocks.back());
        oldest->second.blocks.pop_back();
        kept_ -= oldest->first;
    }

    // Free blocks of one size.
    struct Shelf {
        std::vector<void*> blocks;
        uint64_t last_use = 0;
    };

    std::mutex mutex_;
    std::map<size_t, Shelf> shelves_;
    uint64_t uses_ = 0;
    size_t live_ = 0;
    size_t kept_ = 0;
    size_t peak_ = 0;
};

} // namespace

extern "C" void merak_tch_pool_memory() {
    c10::SetCPUAllocator(&Pool::instance(), /*priority=*/1);
}
