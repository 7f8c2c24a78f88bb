"""torchft 0.2.0's public API as facts: names and parameters, found with ``inspect.signature`` on its wheel.

A parameter with a default ends in "=". "*" in front: takes any number of them.
"""

MANAGER = {
    "__init__": "pg load_state_dict state_dict min_replica_size use_async_quorum= timeout= quorum_timeout= connect_timeout= rank= "
    "world_size= world_size_mode= store_addr= store_port= lighthouse_addr= replica_id= port= hostname= heartbeat_interval= "
    "checkpoint_transport= init_sync= max_retries= quorum_retries=",
    "allow_state_dict_read": "",
    "allreduce": "tensor should_quantize= reduce_op=",
    "batches_committed": "",
    "current_step": "",
    "disallow_state_dict_read": "",
    "errored": "",
    "is_participating": "",
    "load_state_dict": "state_dict",
    "num_participants": "",
    "participating_rank": "",
    "register_state_dict_fn": "key load_state_dict state_dict",
    "report_error": "e",
    "set_state_dict_fns": "load_state_dict state_dict",
    "should_commit": "timeout=",
    "shutdown": "wait=",
    "start_quorum": "allow_heal= shrink_only= timeout=",
    "state_dict": "",
    "wait_quorum": "",
    "wrap_future": "fut default timeout=",
}
PROCESS_GROUP = {
    "abort": "",
    "allgather": "output_tensors input_tensor opts",
    "allgather_into_tensor_coalesced": "output_tensors input_tensors opts",
    "allreduce": "tensors opts",
    "allreduce_coalesced": "tensors opts",
    "alltoall_base": "output_buffer input_buffer output_split_sizes input_split_sizes opts",
    "barrier": "opts=",
    "broadcast": "tensor_list opts",
    "broadcast_one": "tensor root",
    "configure": "store_addr replica_id rank world_size quorum_id= group_rank= group_world_size= global_ranks=",
    "errored": "",
    "getBackendName": "",
    "recv": "tensors src_rank tag",
    "reduce_scatter": "output_tensors input_tensors opts",
    "reduce_scatter_tensor_coalesced": "output_tensors input_tensors opts",
    "register": "name",
    "send": "tensors dst_rank tag",
    "set_timeout": "timeout",
    "shutdown": "",
    "size": "",
    "unregister": "",
}
WRAPPER = {**PROCESS_GROUP, "abort": "errored="}
OPTIMIZER = {
    "__init__": "manager optim",
    "add_param_group": "param_group",
    "load_state_dict": "state_dict",
    "state_dict": "",
    "step": "closure=",
    "zero_grad": "set_to_none=",
}
SAMPLER = {"__init__": "dataset replica_rank num_replica_groups group_rank= num_replicas= *kwargs"}
DDP = {"__init__": "manager module *kwargs"}
TRANSPORT = {
    "disallow_checkpoint": "",
    "metadata": "",
    "recv_checkpoint": "src_rank metadata step timeout",
    "send_checkpoint": "dst_ranks step state_dict timeout",
    "shutdown": "wait=",
}
HTTP_TRANSPORT = {**TRANSPORT, "__init__": "timeout num_chunks", "address": ""}
PG_TRANSPORT = {**TRANSPORT, "__init__": "pg timeout device state_dict="}

CLASSES: dict[str, dict[str, str]] = {
    "torchft.DistributedDataParallel": DDP,
    "torchft.DistributedSampler": SAMPLER,
    "torchft.Manager": MANAGER,
    "torchft.Optimizer": OPTIMIZER,
    "torchft.ProcessGroupBabyNCCL": {**PROCESS_GROUP, "__init__": "timeout="},
    "torchft.ProcessGroupGloo": {**WRAPPER, "__init__": "timeout="},
    "torchft.ProcessGroupNCCL": {**WRAPPER, "__init__": "timeout="},
    "torchft.checkpointing.CheckpointTransport": TRANSPORT,
    "torchft.checkpointing.HTTPTransport": HTTP_TRANSPORT,
    "torchft.checkpointing.http_transport.HTTPTransport": HTTP_TRANSPORT,
    "torchft.checkpointing.pg_transport.PGTransport": PG_TRANSPORT,
    "torchft.checkpointing.transport.CheckpointTransport": TRANSPORT,
    "torchft.coordination.LighthouseClient": {
        "__init__": "addr connect_timeout",
        "heartbeat": "replica_id timeout=",
        "quorum": "replica_id timeout address= store_address= step= world_size= shrink_only= data=",
    },
    "torchft.coordination.LighthouseServer": {
        "__init__": "bind min_replicas join_timeout_ms= quorum_tick_ms= heartbeat_timeout_ms=",
        "address": "",
        "shutdown": "",
    },
    "torchft.data.DistributedSampler": SAMPLER,
    "torchft.ddp.DistributedDataParallel": DDP,
    "torchft.ddp.PureDistributedDataParallel": {"__init__": "manager module", "forward": "*args"},
    "torchft.local_sgd.DiLoCo": {
        "__init__": "manager model_fragments inner_optimizer outer_optimizer sync_every backup_device= pin_memory= "
        "use_bucketization= bucket_cap_mb= should_quantize= fragment_sync_delay= fragment_update_alpha=",
    },
    "torchft.local_sgd.LocalSGD": {"__init__": "manager model optimizer sync_every"},
    "torchft.manager.Manager": MANAGER,
    "torchft.optim.OptimizerWrapper": OPTIMIZER,
    "torchft.parameter_server.ParameterServer": {
        "__init__": "port store_port=",
        "address": "",
        "forward": "session_id pg",
        "new_process_group": "",
        "new_session": "address",
    },
    "torchft.process_group.ErrorSwallowingProcessGroupWrapper": {
        **WRAPPER,
        "__init__": "pg",
        "error": "",
        "report_error": "e",
    },
    "torchft.process_group.FakeProcessGroupWrapper": {
        **WRAPPER,
        "__init__": "pg",
        "report_future_error": "e",
    },
    "torchft.process_group.ManagedProcessGroup": {
        "__init__": "manager",
        **{
            name: WRAPPER[name]
            for name in ("abort", "allreduce", "allreduce_coalesced", "getBackendName", "register")
        },
        **{name: WRAPPER[name] for name in ("shutdown", "size", "unregister")},
    },
    "torchft.process_group.ProcessGroup": PROCESS_GROUP,
    "torchft.process_group.ProcessGroupBabyGloo": {**PROCESS_GROUP, "__init__": "timeout="},
    "torchft.process_group.ProcessGroupBabyNCCL": {**PROCESS_GROUP, "__init__": "timeout="},
    "torchft.process_group.ProcessGroupDummy": {**PROCESS_GROUP, "__init__": "rank world"},
    "torchft.process_group.ProcessGroupGloo": {**WRAPPER, "__init__": "timeout="},
    "torchft.process_group.ProcessGroupNCCL": {**WRAPPER, "__init__": "timeout="},
    "torchft.process_group.ProcessGroupWrapper": {**WRAPPER, "__init__": "timeout= pg="},
}
FUNCTIONS: dict[str, str] = {
    "torchft.futures.context_timeout": "callback timeout",
    "torchft.futures.future_timeout": "fut timeout",
    "torchft.futures.future_wait": "fut timeout",
    "torchft.futures.stream_timeout": "callback timeout",
    "torchft.local_sgd.extract_local_tensor": "t",
    "torchft.otel.setup_logger": "name",
    "torchft.otel.shutdown": "",
    "torchft.process_group.create_store_client": "store_addr timeout",
    "torchft.setup_logger": "name",
}
VALUES = (
    "torchft.coordination.Quorum",
    "torchft.coordination.QuorumMember",
    "torchft.manager.TIMEOUT_SEC_ENV",
    "torchft.manager.WorldSizeMode",
)
NOT_OFFERED = (
    "torchft.ProcessGroupBabyXCCL",
    "torchft.ProcessGroupXCCL",
    "torchft.collectives",
    "torchft.coordination.ManagerClient",
    "torchft.coordination.ManagerServer",
    "torchft.http",
    "torchft.local_sgd.LocalSGD.sync",
    "torchft.local_sgd.USE_BUCKETIZATION_ENV",
    "torchft.manager.CONNECT_TIMEOUT_SEC_ENV",
    "torchft.manager.ExceptionWithTraceback",
    "torchft.manager.MANAGER_ADDR_KEY",
    "torchft.manager.MANAGER_PORT_ENV",
    "torchft.manager.QUORUM_RETRIES_ENV",
    "torchft.manager.QUORUM_TIMEOUT_SEC_ENV",
    "torchft.manager.REPLICA_ID_KEY",
    "torchft.manager.WorldSizeMode.FIXED_WITH_SPARES",
    "torchft.manager.extract_trailing_digits",
    "torchft.manager.get_timeout",
    "torchft.multiprocessing",
    "torchft.otel.TeeLogExporter",
    "torchft.process_group.ProcessGroupBaby",
    "torchft.process_group.ProcessGroupBabyXCCL",
    "torchft.process_group.ProcessGroupXCCL",
    "torchft.process_group.trigger_nccl_fr_trace_through_pipe",
    "torchft.quantization",
    "torchft.torchcomms",
    "torchft.torchx",
    "torchft.utils",
)
"""Each is in docs/from-torchft.md, with what to do instead."""
