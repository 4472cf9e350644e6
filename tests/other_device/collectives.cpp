// Collectives of the other device's tensors.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

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
  Done broadcast(Tensors& data, const c10d::BroadcastOptions& how) override {
    auto on = all(data);
    return inner_->broadcast(on, how);
  }
  Done allreduce(Tensors& data, const c10d::AllreduceOptions& how) override {
    auto on = all(data);
    return inner_->allreduce(on, how);
  }
  Done reduce(Tensors& data, const c10d::ReduceOptions& how) override {
    auto on = all(data);
    return inner_->reduce(on, how);
  }
  Done allgather(Lists& to, Tensors& from, const c10d::AllgatherOptions& how) override {
    auto out = lists(to);
    auto in = all(from);
    return inner_->allgather(out, in, how);
  }
  Done _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& how) override {
    auto out = one(to), in = one(from);
    return inner_->_allgather_base(out, in, how);
  }
  Done allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& how) override {
    auto out = all(to), in = all(from);
    return inner_->allgather_into_tensor_coalesced(out, in, how);
  }
  Done gather(Lists& to, Tensors& from, const c10d::GatherOptions& how) override {
    auto out = lists(to);
    auto in = all(from);
    return inner_->gather(out, in, how);
  }
  Done scatter(Tensors& to, Lists& from, const c10d::ScatterOptions& how) override {
    auto out = all(to);
    auto in = lists(from);
    return inner_->scatter(out, in, how);
  }
  Done reduce_scatter(Tensors& to, Lists& from, const c10d::ReduceScatterOptions& how) override {
    auto out = all(to);
    auto in = lists(from);
    return inner_->reduce_scatter(out, in, how);
  }
  Done _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& how) override {
    auto out = one(to), in = one(from);
    return inner_->_reduce_scatter_base(out, in, how);
  }
  Done reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& how) override {
    auto out = all(to), in = all(from);
    return inner_->reduce_scatter_tensor_coalesced(out, in, how);
  }
  Done alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& received, std::vector<int64_t>& sent,
      const c10d::AllToAllOptions& how) override {
    auto out = one(to), in = one(from);
    return inner_->alltoall_base(out, in, received, sent, how);
  }
  Done send(Tensors& data, int to, int tag) override {
    auto on = all(data);
    return inner_->send(on, to, tag);
  }
  Done recv(Tensors& data, int from, int tag) override {
    auto on = all(data);
    return inner_->recv(on, from, tag);
  }
  Done barrier(const c10d::BarrierOptions& how) override { return inner_->barrier(how); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

 private:
  static at::Tensor one(const at::Tensor& given) {
    TORCH_CHECK(given.device().type() == kOther, "a tensor of the ", given.device(), " in a collective of the other device");
    TORCH_CHECK(given.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    return OnCpu().of(given);
  }
  static Tensors all(const Tensors& given) {
    Tensors made;
    for (const auto& tensor : given) made.push_back(one(tensor));
    return made;
  }
  static Lists lists(const Lists& given) {
    Lists made;
    for (const auto& tensors : given) made.push_back(all(tensors));
    return made;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(inner);
  });
}
