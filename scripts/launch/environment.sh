# shellcheck shell=bash
# What every launch sets; each script here sources it. Values that are set already stay.

# torchrun hands its own store to the ranks and keeps it when it starts them again, so that gloo and NCCL find the
# addresses of ranks that are dead ("connection refused", or a hang). With this each attempt gets a new store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"

# One thread a rank for operators on the CPU, unless the machine has cores to spare (cores / ranks on it).
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# --- NCCL: only on GPUs; gloo reads none of these -------------------------------------------------------------------

# Warnings of NCCL in the log. For a hang at the first collective: INFO, NCCL_DEBUG_SUBSYS=INIT,NET and look which
# interfaces and transports it took ("NET/IB" between nodes, "P2P" or "NVLS" within one; "NET/Socket" is the slow one).
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# Where nodes have several network interfaces, NCCL and gloo must take the one that all nodes reach; docker0 and the
# like are the usual wrong ones. A prefix (eth) or a list, `^docker,lo` for all but these. Both want it set alike.
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# InfiniBand or RoCE cards that belong to the compute network, where others (storage) are in the node too:
#   export NCCL_IB_HCA=mlx5_0,mlx5_1
# RoCE needs the index of the GID that is routed (show_gids tells; 3 is RoCE v2 over IPv4 on many hosts):
#   export NCCL_IB_GID_INDEX=3

# A collective that does not end within the process group's timeout ends its process, which torchrun sees and restarts;
# the last collectives of all ranks are written down before, for `torchfrtrace`. A hang becomes an error with a name.
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
