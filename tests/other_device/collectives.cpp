// Collectives of the other device's tensors.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <tuple>

#include "on_cpu.h"

namespace {

// Collectives of the device's tensors, by another backend (gloo) over the same memory. As NCCL it wants them dense.
class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Done = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "other"; }
  Done broadcast(Tensors& data, const c10d::BroadcastOptions& how) override { return run(&Backend::broadcast, how, data); }
  Done allreduce(Tensors& data, const c10d::AllreduceOptions& how) override { return run(&Backend::allreduce, how, data); }
  Done allgather(Lists& to, Tensors& from, const c10d::AllgatherOptions& how) override {
    return run(&Backend::allgather, how, to, from);
  }
  Done _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& how) override {
    return run(&Backend::_allgather_base, how, to, from);
  }
  Done allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& how) override {
    return run(&Backend::allgather_into_tensor_coalesced, how, to, from);
  }
  Done gather(Lists& to, Tensors& from, const c10d::GatherOptions& how) override {
    return run(&Backend::gather, how, to, from);
  }
  Done scatter(Tensors& to, Lists& from, const c10d::ScatterOptions& how) override {
    return run(&Backend::scatter, how, to, from);
  }
  Done _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& how) override {
    return run(&Backend::_reduce_scatter_base, how, to, from);
  }
  Done reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& how) override {
    return run(&Backend::reduce_scatter_tensor_coalesced, how, to, from);
  }
  Done alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& received, std::vector<int64_t>& sent,
      const c10d::AllToAllOptions& how) override {
    auto out = on_cpu(to), in = on_cpu(from);
    return inner_->alltoall_base(out, in, received, sent, how);
  }
  Done barrier(const c10d::BarrierOptions& how) override { return inner_->barrier(how); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

 private:
  static at::Tensor on_cpu(const at::Tensor& given) {
    TORCH_CHECK(given.device().type() == kOther, "a tensor of the ", given.device(), " in a collective of the other device");
    TORCH_CHECK(given.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    return OnCpu().of(given);
  }
  template <typename T>
  static std::vector<T> on_cpu(const std::vector<T>& given) {
    std::vector<T> made;
    for (const auto& one : given) made.push_back(on_cpu(one));
    return made;
  }

  // The other backend's method, on CPU tensors over the memory of these.
  template <typename Method, typename How, typename... T>
  Done run(Method method, const How& how, T&... given) {
    return std::apply(
        [&](auto... on) { return (inner_.get()->*method)(on..., how); }, std::tuple<T...>{on_cpu(given)...});
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(inner);
  });
}
