// A device that is not the CPU, for tests on machines without one: PrivateUse1, over the CPU's memory and kernels.
//
// An op on its tensors runs on CPU tensors over the same memory; what it returns belongs to the device. As on a GPU, an
// op that is given tensors of both devices is refused, but for those that copy between them, index tensors and scalars.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "on_cpu.h"

c10::DataPtr on_device(c10::DataPtr data) {
  auto* owner = new c10::DataPtr(std::move(data));
  return {owner->get(), owner, [](void* p) { delete static_cast<c10::DataPtr*>(p); }, kDevice};
}

namespace {

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return on_device(c10::GetCPUAllocator()->allocate(bytes)); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kOther, &allocator);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kOther> {
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  // The autograd engine waits for events of the device's one stream; work is done when it is called.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

Hooks hooks;
const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// Indices may lie on the CPU, as on a GPU; copies between the devices have a kernel of their own.
bool may_mix(const std::string& name) { return name == "aten::index.Tensor" || name == "aten::_index_put_impl_"; }

template <typename F>
c10::IValue each(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorVector()) made.push_back(f(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
      made.push_back(t.has_value() ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    }
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kOther) return c10::Device(c10::kCPU);
  return value;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = toString(op.operator_name());
  const auto taken = schema.arguments().size();
  auto arguments = torch::jit::last(*stack, taken).vec();
  torch::jit::drop(*stack, taken);
  OnCpu cpu;
  std::string strange;
  for (auto& argument : arguments) {
    argument = each(argument, [&](const at::Tensor& t) {
      if (t.defined() && t.device().is_cpu() && t.dim() > 0) strange = c10::str(t.sizes());
      return cpu.of(t);
    });
  }
  TORCH_CHECK(strange.empty() || may_mix(name), "Expected all tensors to be on the same device, but ", name,
      " was given a tensor ", strange, " of the cpu beside tensors of the other device");
  for (auto& argument : arguments) stack->push_back(std::move(argument));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  cpu.finish();
  const auto returned = schema.returns().size();
  auto results = torch::jit::last(*stack, returned).vec();
  torch::jit::drop(*stack, returned);
  for (auto& result : results) {
    stack->push_back(each(result, [&](const at::Tensor& t) { return cpu.back(t); }));
  }
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(),
      c10::DispatchKeySet(kBackend), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
      c10::DispatchKeySet(kBackend), c10::dtype_or_default(dtype));
}

at::Tensor& set(at::Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  }
  return self;
}

at::Tensor& set_whole(at::Tensor& self, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set(self, std::move(storage), 0, c10::SymInt(count), {});
}

at::Tensor& set_like(at::Tensor& self, const at::Tensor& other) {
  return set(self, other.storage(), other.sym_storage_offset(), other.sym_sizes(), other.sym_strides());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  OnCpu cpu;
  cpu.of(to).copy_(cpu.of(from));
  return to;
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  OnCpu cpu;
  const auto made = at::convolution(cpu.of(x), cpu.of(weight), bias ? std::optional(cpu.of(*bias)) : bias, stride, padding,
      dilation, transposed, output_padding, groups);
  return cpu.back(made);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& x,
    const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> needed) {
  OnCpu cpu;
  const int64_t features = gradient.size(1);
  const auto [dx, dw, db] = at::convolution_backward(cpu.of(gradient), cpu.of(x), cpu.of(weight),
      at::IntArrayRef(&features, 1), stride, padding, dilation, transposed, output_padding, groups, needed);
  return {cpu.back(dx), cpu.back(dw), cpu.back(db)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("set_.source_Tensor", &set_like);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace

c10::Allocator* device_allocator() { return &allocator; }
