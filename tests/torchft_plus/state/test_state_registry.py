"""What is registered, what two replicas compare, and what a digest sees."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from state_replicas import adamw, apply, fetch, head_at, make_replica, serve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from torchft_plus.state import CatchUp, StateError, StateRegistry, StateServer, describe_mismatch
from torchft_plus.state.manifest import Manifest, safetensors_header


def _manifest(registry: StateRegistry) -> Manifest:
    snapshot = registry.snapshot()
    specs = snapshot.specs()
    header = safetensors_header(head_at(1), specs)
    return Manifest(head_at(1), registry.signature(), specs, len(header), snapshot.values, snapshot.trees)


def test_names_parameters_persistent_buffers_and_optimizer_state() -> None:
    replica = make_replica(1)
    assert [name for name, _ in replica.registry.snapshot().entries if not name.startswith("model/")] == []
    replica.train(1, 1)
    names = {name for name, _ in replica.registry.snapshot().entries}
    assert {"model/first.weight", "model/seen", "optimizer/0/exp_avg", "optimizer/4/step"} <= names
    assert "model/transient" not in names


def test_digest_sees_every_part_and_nothing_else() -> None:
    replica = make_replica(1)
    replica.train(1, 3)
    digests = [replica.registry.digest()]
    assert replica.registry.digest() == digests[0]

    def changed() -> None:
        digests.append(replica.registry.digest())
        assert digests.count(digests[-1]) == 1

    with torch.no_grad():
        replica.net.first.weight[3, 2] += 1e-6
        changed()
        replica.net.seen[1] = 5
        changed()
    replica.optimizer.state[replica.net.first.bias]["step"].add_(1)
    changed()
    replica.optimizer.param_groups[1]["lr"] = math.nextafter(replica.optimizer.param_groups[1]["lr"], 1)
    changed()
    replica.scheduler.last_epoch += 1
    changed()
    replica.net.transient.add_(1)
    replica.net.first.weight.grad = None
    assert replica.registry.digest() == digests[-1]


def test_local_buffers_are_sent_but_not_compared() -> None:
    def make(seed: int) -> tuple[nn.Module, StateRegistry]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        registry = StateRegistry()
        buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
        registry.register_module("m", net, local_buffers=buffers)
        return net, registry

    net, registry = make(1)
    before = registry.digest()
    net(torch.randn(8, 3))
    assert registry.digest() == before
    server = StateServer(registry)
    serve(server, head_at(1))
    other_net, other = make(2)
    apply(other, fetch(other, head_at(1), server.address))
    assert torch.equal(other_net[1].running_mean, net[1].running_mean)  # type: ignore[union-attr]
    server.close()
    with pytest.raises(
        StateError, match=r"local_buffers of 'm' names '1.mean', which is no persistent buffer"
    ):
        StateRegistry().register_module("m", net, local_buffers=["1.mean"])


def test_digest_is_fast() -> None:
    """No copies: far above what a pass with a copy per tensor would give on a slow machine."""
    registry = StateRegistry()
    tensors = {str(i): torch.ones(1 << 20) for i in range(32)}
    registry.register_tensors("x", lambda: tensors)
    registry.digest()
    best = min(_seconds(registry) for _ in range(5))
    assert registry.size_bytes() / best > 2e9


def _seconds(registry: StateRegistry) -> float:
    started = time.perf_counter()
    registry.digest()
    return time.perf_counter() - started


def test_signature_names_the_field_that_differs() -> None:
    plain, fused = (
        make_replica(1),
        make_replica(1, lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True)),
    )
    sentence = describe_mismatch(plain.registry.signature(), fused.registry.signature(), "replica_1")
    assert sentence is not None
    assert "'optimizer.group 0.fused' is 'True' at replica_1 and 'None' here" in sentence
    assert describe_mismatch(plain.registry.signature(), make_replica(9).registry.signature()) is None
    with pytest.raises(StateError, match=r"group 0.fused"):
        plain.registry.plan_load(_manifest(fused.registry))
    other = make_replica(1, lambda groups: torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(StateError, match=r"optimizer.class"):
        plain.registry.plan_load(_manifest(other.registry))
    with pytest.raises(StateError, match="'shard' is 'rank 1 of 2'"):
        StateRegistry("rank 0 of 2").plan_load(_manifest(StateRegistry("rank 1 of 2")))


@pytest.mark.parametrize(
    ("own", "donors", "sentence"),
    [
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(3)},
            r"'x/a' is float32\[3\] at the donor and float32\[2\] here",
        ),
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(2).half()},
            r"float16\[2\] at the donor and float32\[2\] here",
        ),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, "'x/b' .* is not registered here"),
        ({"a": torch.zeros(2)}, {}, "'x/a' is registered here but the donor does not have it"),
    ],
)
def test_layouts_that_differ_name_the_tensor(
    own: dict[str, torch.Tensor], donors: dict[str, torch.Tensor], sentence: str
) -> None:
    registry, other = StateRegistry(), StateRegistry()
    registry.register_tensors("x", lambda: own)
    other.register_tensors("x", lambda: donors)
    with pytest.raises(StateError, match=sentence):
        registry.plan_load(_manifest(other))
    assert registry.holds_state


def test_a_manifest_cannot_make_us_allocate_without_bound() -> None:
    joiner = make_replica(1)
    donor = make_replica(1)
    donor.optimizer.state[donor.net.first.weight]["huge"] = torch.empty(1 << 28, dtype=torch.uint8)
    with pytest.raises(StateError, match="more than 32 times"):
        joiner.registry.plan_load(_manifest(donor.registry))


def test_missing_registrations_are_named() -> None:
    registry, other = StateRegistry(), StateRegistry()
    registry.register_values("schedule", lambda: 1, lambda _: None)
    with pytest.raises(StateError, match="no plain values for 'schedule'"):
        registry.plan_load(_manifest(other))
    with pytest.raises(StateError, match="'schedule', which is not registered here"):
        other.plan_load(_manifest(registry))


@pytest.mark.parametrize("name", ["", "a/b", "a\n", "x" * 300])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(StateError, match="cannot be the name"):
        StateRegistry().register_values(name, lambda: 1, lambda _: None)


def test_registration_refuses_what_could_not_be_sent() -> None:
    registry = StateRegistry()
    registry.register_values("twice", lambda: 1, lambda _: None)
    with pytest.raises(StateError, match="'twice' is registered already"):
        registry.register_values("twice", lambda: 1, lambda _: None)
    with pytest.raises(StateError, match="register_tensors"):
        registry.register_values("object", lambda: {"a": object()}, lambda _: None)
    with pytest.raises(StateError, match="run the lazy module once"):
        registry.register_module("lazy", nn.LazyLinear(3))
    with pytest.raises(StateError, match="on meta, which has no bytes"):
        registry.register_module("meta", nn.Linear(2, 2, device="meta"))
    with pytest.raises(StateError, match="sparse"):
        registry.register_tensors("sparse", lambda: {"a": torch.eye(3).to_sparse()})
    with pytest.raises(StateError, match="two tensors have the name"):
        registry.register_state_dict("keys", lambda: {1: torch.zeros(1), "1": torch.zeros(1)}, lambda _: None)
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state["global"] = {"k": 1}  # type: ignore[index]
    with pytest.raises(StateError, match="keys that are not its parameters"):
        registry.register_optimizer("odd", optimizer)
    assert registry.signature().keys() == {"shard", "torch"}, (
        "a refused registration must leave nothing behind"
    )


def test_digest_is_refused_while_the_memory_is_a_mixture() -> None:
    replica = make_replica(1)
    replica.registry.begin_load(_manifest(replica.registry))
    assert not replica.registry.holds_state
    with pytest.raises(StateError, match="no digest"):
        replica.registry.digest()
    server = StateServer(replica.registry)
    with pytest.raises(StateError, match="cannot be published"):
        server.publish(head_at(1))
    server.close()


def test_torchft_callables_get_their_nested_dict() -> None:
    class User:
        def __init__(self, value: float, momentum: bool) -> None:
            self.weights = torch.full((3,), value)
            self.state = {"momentum": torch.full((2,), value)} if momentum else {}
            self.step = int(value)
            self.loaded: object = None

        def save(self) -> dict[str, object]:
            return {"weights": [self.weights], "opt": self.state, "step": self.step, "lr": (0.1, math.inf)}

        def load(self, state: dict[str, object]) -> None:
            self.loaded = state

    donor, joiner = User(3, momentum=True), User(0, momentum=False)
    registries = [StateRegistry(), StateRegistry()]
    for registry, user in zip(registries, (donor, joiner), strict=True):
        registry.register_state_dict("user", user.save, user.load)
    server = StateServer(registries[0])
    serve(server, head_at(1))
    report = fetch(registries[1], head_at(1), server.address)
    assert joiner.loaded is None, "nothing half-loaded is applied"
    apply(registries[1], report)
    loaded = joiner.loaded
    assert isinstance(loaded, dict)
    assert loaded["step"] == 3
    assert loaded["lr"] == (0.1, math.inf)
    assert loaded["weights"][0].data_ptr() == joiner.weights.data_ptr()
    assert torch.equal(joiner.weights, donor.weights)
    assert torch.equal(loaded["opt"]["momentum"], donor.state["momentum"])
    assert registries[1].obstacles_to_catch_up() == (
        "the state behind the callables of 'user' is loaded as a whole",
    )
    server.close()


def test_optimizer_state_that_the_donor_lacks_is_removed() -> None:
    donor, joiner = make_replica(1), make_replica(2)
    joiner.train(1, 4)
    server = StateServer(donor.registry)
    serve(server, head_at(0))
    apply(joiner.registry, fetch(joiner.registry, head_at(0), server.address))
    assert not joiner.optimizer.state
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


def test_schedule_and_groups_agree_after_a_heal() -> None:
    donor, joiner = make_replica(1), make_replica(2)
    donor.train(1, 10)
    server = StateServer(donor.registry)
    serve(server, head_at(10))
    apply(joiner.registry, fetch(joiner.registry, head_at(10), server.address))
    assert joiner.scheduler.get_last_lr() == [group["lr"] for group in joiner.optimizer.param_groups]
    for step in range(11, 16):
        donor.train(step, step)
        joiner.train(step, step)
        assert joiner.registry.digest() == donor.registry.digest()
    server.close()


@pytest.fixture(name="mesh_of_two")
def _mesh_of_two() -> Iterator[dist.device_mesh.DeviceMesh]:
    """A mesh of two ranks of which only this one exists: enough for state, which needs no communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["adamw", "adamw fused", "sgd"])
def test_shards_of_dtensors(mesh_of_two: dist.device_mesh.DeviceMesh, kind: str) -> None:
    make_optimizer = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }[kind]

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, StateRegistry]:
        torch.manual_seed(seed)
        net = nn.Linear(5, 7)
        for name, parameter in list(net.named_parameters()):
            placements = [dist.tensor.Shard(0)]
            sharded = distribute_tensor(parameter.detach(), mesh_of_two, placements, src_data_rank=None)
            setattr(net, name, nn.Parameter(sharded))
        optimizer = make_optimizer(net.parameters())
        registry = StateRegistry("rank 1 of 2")
        registry.register_module("model", net)
        registry.register_optimizer("optimizer", optimizer)
        return net, optimizer, registry

    def gradients(net: nn.Module, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            assert isinstance(parameter, DTensor)
            local = parameter.to_local()
            parameter.grad = DTensor.from_local(  # type: ignore[assignment]
                torch.randn(local.shape, generator=generator),
                mesh_of_two,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    (net, optimizer, registry), (joining, late, other) = make(1), make(2)
    for step in (1, 2):
        gradients(net, step)
        optimizer.step()
    server = StateServer(registry)
    serve(server, head_at(2))
    catch_up = CatchUp(other, 5)
    catch_up.begin(head_at(2))
    report = fetch(other, head_at(2), server.address)
    assert catch_up.take_values(0)
    for step in (3, 4):
        gradients(net, step)
        gradients(joining, step)
        server.before_update()
        optimizer.step()
        catch_up.record([late], head_at(step))
    assert catch_up.replay(report)
    assert other.digest() == registry.digest()
    for parameter in joining.parameters():
        for value in late.state[parameter].values():
            assert not value.shape or isinstance(value, DTensor)
    server.close()


def test_only_what_optimizers_advance_can_be_caught_up() -> None:
    replica = make_replica(1, adamw)
    assert replica.registry.obstacles_to_catch_up() == ()
    average = {"w": torch.zeros(2)}
    replica.registry.register_tensors("outer", lambda: average, advanced_by_optimizer=True)
    assert replica.registry.obstacles_to_catch_up() == ()
    replica.registry.register_tensors("average", lambda: average)
    assert len(replica.registry.obstacles_to_catch_up()) == 1
