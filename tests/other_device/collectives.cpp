// Collectives of tensors that are not the CPU's: the other device's, and those of GPUs that ranks share.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <tuple>

#include "on_cpu.h"

namespace {

// By another backend (gloo): over the other device's memory, or on copies, which are back when a call returns. As NCCL
// it wants tensors that are dense.
class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> inner, bool copies)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), copies_(copies) {}

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
    return landed(inner_->alltoall_base(out, in, received, sent, how), out, to);
  }
  Done barrier(const c10d::BarrierOptions& how) override { return inner_->barrier(how); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

 private:
  at::Tensor on_cpu(const at::Tensor& given) const {
    TORCH_CHECK(given.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    if (copies_) return given.detach().to(at::kCPU, given.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    TORCH_CHECK(given.device().type() == kOther, "a tensor of the ", given.device(), " in a collective of the other device");
    return OnCpu().of(given);
  }
  template <typename T>
  std::vector<T> on_cpu(const std::vector<T>& given) const {
    std::vector<T> made;
    for (const auto& one : given) made.push_back(on_cpu(one));
    return made;
  }

  static void copy_back(const at::Tensor& from, const at::Tensor& to) { to.copy_(from); }
  template <typename T>
  static void copy_back(const std::vector<T>& from, const std::vector<T>& to) {
    for (size_t i = 0; i < to.size(); ++i) copy_back(from[i], to[i]);
  }

  // The work, whose result `to` has at once if it is on a copy. As NCCL's, it leaves versions for autograd as they are.
  template <typename T>
  Done landed(Done work, const T& copy, const T& to) const {
    if (copies_) {
      work->wait();
      at::AutoDispatchBelowADInplaceOrView below;
      copy_back(copy, to);
    }
    return work;
  }

  // The other backend's method, on CPU tensors; the first of these is what it writes.
  template <typename Method, typename How, typename To, typename... From>
  Done run(Method method, const How& how, To& to, From&... from) {
    return std::apply(
        [&](auto out, auto... in) { return landed((inner_.get()->*method)(out, in..., how), out, to); },
        std::tuple<To, From...>{on_cpu(to), on_cpu(from)...});
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  bool copies_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& inner, bool copies) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(inner, copies);
  });
}
