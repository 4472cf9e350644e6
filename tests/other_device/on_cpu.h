// How an op on tensors of the other device runs: on CPU tensors over the same memory.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <map>
#include <utility>
#include <vector>

constexpr auto kOther = c10::DeviceType::PrivateUse1;
constexpr auto kBackend = c10::DispatchKey::PrivateUse1;
inline const c10::Device kDevice(kOther, 0);

c10::Allocator* device_allocator();
c10::DataPtr on_device(c10::DataPtr data);

inline c10::DispatchKeySet keys_of(c10::DispatchKey backend, const at::Tensor& like) {
  c10::DispatchKeySet keys(backend);
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    if (like.key_set().has(key)) keys = keys.add(key);
  }
  return keys;
}

// A tensor over `storage`, with sizes and strides of `like`.
template <typename... View>
at::Tensor over(const c10::Storage& storage, c10::DispatchKeySet keys, const at::Tensor& like, View... view) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(view..., c10::Storage(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// CPU tensors over the memory of the device's, for one op.
class OnCpu {
 public:
  at::Tensor of(const at::Tensor& given) {
    if (!given.defined() || given.device().type() != kOther) return given;
    auto* storage = given.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      auto* owner = new c10::Storage(given.storage());
      c10::DataPtr borrowed(storage->mutable_data(), owner, [](void* p) { delete static_cast<c10::Storage*>(p); }, c10::kCPU);
      auto made = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), storage->nbytes(), std::move(borrowed), c10::GetCPUAllocator(), true);
      found = storages_.emplace(storage, Both{c10::Storage(made), storage->mutable_data()}).first;
    }
    auto made = over(found->second.cpu, keys_of(c10::DispatchKey::CPU, given), given);
    pairs_.emplace_back(given, made);
    return made;
  }

  // What an op did to its arguments beside writing into them: resized them.
  void finish() {
    for (auto& [storage, both] : storages_) {
      auto* cpu = both.cpu.unsafeGetStorageImpl();
      if (cpu->mutable_data() != both.data) {
        storage->set_data_ptr_noswap(on_device(cpu->set_data_ptr(c10::DataPtr())));
        storage->set_nbytes(cpu->nbytes());
      }
    }
    for (auto& [given, made] : pairs_) {
      if (given.sizes() != made.sizes() || given.strides() != made.strides()) {
        given.unsafeGetTensorImpl()->set_storage_offset(made.storage_offset());
        given.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
      }
    }
  }

  at::Tensor back(const at::Tensor& result) const {
    if (!result.defined() || !result.has_storage()) return result;
    for (const auto& [given, made] : pairs_) {
      if (made.is_same(result)) return given;
    }
    for (const auto& [given, made] : pairs_) {
      if (made.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return over(given.storage(), given.key_set(), result, c10::TensorImpl::VIEW);  // in inference mode too
      }
    }
    auto holder = result.storage();
    auto* owner = new c10::Storage(holder);
    c10::DataPtr data(holder.mutable_data(), owner, [](void* p) { delete static_cast<c10::Storage*>(p); }, kDevice);
    auto made = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), holder.nbytes(), std::move(data), device_allocator(), true);
    return over(c10::Storage(made), keys_of(kBackend, result), result);
  }

 private:
  struct Both {
    c10::Storage cpu;
    void* data;
  };
  std::map<c10::StorageImpl*, Both> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};
