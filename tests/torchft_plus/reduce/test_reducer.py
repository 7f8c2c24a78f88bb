from __future__ import annotations

import copy
import logging
import signal
import time

import pytest
import torch
from held_lane import HeldLane
from rank_processes import Rank, run_ranks, start_ranks, wait_ended
from reduction_cases import CASES, Net, data
from torch import nn
from torch._C._distributed_c10d import HashStore

from torchft_plus.process_group.gloo import GlooBackend
from torchft_plus.process_group.lane import Lane, LaneError, LaneSpec
from torchft_plus.reduce.reducer import GradientReducer


def _sum(lane: Lane, tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    operation = lane.allreduce(result)
    wait_ended([operation])
    assert operation.error is None
    return result


def _finish(reducer: GradientReducer, lane: Lane, votes: Lane, total: float) -> int:
    """What a Manager does after the backward; returns how often everything was posted again."""
    repeats = 0
    while True:
        posted = reducer.post(lane)
        wait_ended(posted.operations)
        assert all(operation.error is None for operation in posted.operations)
        if not float(_sum(votes, torch.tensor([float(posted.stale)]))):
            reducer.write_back(total)
            return repeats
        reducer.again()
        repeats += 1


def _expected(model: nn.Module, votes: Lane, weight: float, total: float) -> dict[str, torch.Tensor | None]:
    """Plain autograd, then one allreduce a parameter."""
    result: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        present = _sum(votes, torch.tensor([float(parameter.grad is not None and weight > 0)]))
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        summed = _sum(votes, gradient if weight == 1 else gradient * weight)
        result[name] = summed * (1 / total) if float(present) else None
    return result


def _assert_equal(model: nn.Module, expected: dict[str, torch.Tensor | None], exact: bool) -> None:
    for name, parameter in model.named_parameters():
        want = expected[name]
        if want is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            if exact:
                assert torch.equal(parameter.grad, want), name
            else:
                torch.testing.assert_close(parameter.grad, want)


def _case(rank: Rank, name: str) -> tuple[int, list[int]]:
    case = CASES[name]
    lane, votes = rank.lane(1), rank.lane(2)
    torch.manual_seed(0)
    model = case.model()
    reference = copy.deepcopy(model)
    reducer = GradientReducer(list(model.named_parameters()), bucket_bytes=2048, first_bucket_bytes=512)
    repeats, left = 0, []
    for step in range(4):
        for either in (model, reference):
            either.zero_grad()
        reducer.begin(lane, 1.0)
        case.backward(model, rank.rank, step)
        left.append(len(reducer._buckets) - reducer._next)
        repeats += _finish(reducer, lane, votes, float(rank.size))
        case.backward(reference, rank.rank, step)
        _assert_equal(model, _expected(reference, votes, 1.0, float(rank.size)), exact=rank.size == 2)
    return repeats, left


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "compiled" else name for name in CASES]
)
def test_every_gradient_equals_plain_autograd_and_one_allreduce_each(name: str) -> None:
    for repeats, left in run_ranks(_case, 2, name):
        if CASES[name].repeats >= 0:
            assert repeats == CASES[name].repeats
        if CASES[name].overlaps:
            assert left[0] > 0  # the first step teaches
            assert left[1:] == [0, 0, 0]


def test_four_replicas() -> None:
    run_ranks(_case, 4, "mixture")


def _weighted(rank: Rank) -> None:
    """Rank 2 is a joiner: zeros, no hooks, nothing counted."""
    lane, votes = rank.lane(1), rank.lane(2)
    weights = [1.0, 2.5, 0.0]
    total = sum(weights)
    torch.manual_seed(0)
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    reducer = GradientReducer(list(model.named_parameters()), bucket_bytes=2048, first_bucket_bytes=512)
    weight = weights[rank.rank]
    for step in range(3):
        for either in (model, reference):
            either.zero_grad()
            if weight > 0:
                either(data(rank.rank, step), (0, 1, 2, 4)).square().sum().backward()
            elif either is model:
                reducer.begin(lane, weight)
            if weight > 0 and either is model:
                reducer.begin(lane, weight)  # late: gradients are there already
        _finish(reducer, lane, votes, total)
        _assert_equal(model, _expected(reference, votes, weight, total), exact=False)
        assert model.layers[3].weight.grad is None
        joined = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert torch.equal(_sum(votes, joined), 3 * joined) or torch.allclose(_sum(votes, joined), 3 * joined)


def test_weights_and_a_joiner_who_is_not_counted() -> None:
    run_ranks(_weighted, 3)


def _one_contributor(rank: Rank) -> bool:
    lane, votes = rank.lane(1), rank.lane(2)
    torch.manual_seed(0)
    model = Net()
    reducer = GradientReducer(list(model.named_parameters()), bucket_bytes=2048)
    reducer.begin(lane, 1.0 if rank.rank == 0 else 0.0)
    if rank.rank == 0:
        model(data(0, 0)).square().sum().backward()
    before = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    _finish(reducer, lane, votes, 1.0)
    if rank.rank == 0:
        return all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())  # type: ignore[arg-type]
    return all(p.grad is not None for p in model.parameters())


def test_the_gradient_of_one_contributor_among_joiners_is_unchanged() -> None:
    assert run_ranks(_one_contributor, 2) == [True, True]


def _other_dtype(rank: Rank) -> None:
    lane, votes = rank.lane(1), rank.lane(2)
    torch.manual_seed(0)
    parameters = [
        ("a", nn.Parameter(torch.randn(10, dtype=torch.bfloat16))),
        ("b", nn.Parameter(torch.randn(7))),
    ]
    parameters[0][1].grad_dtype = torch.float32  # type: ignore[attr-defined]
    reducer = GradientReducer(parameters)
    assert len(reducer._buckets) == 1  # float32 gradients together
    local = [data(rank.rank, 0)[0, :10], data(rank.rank, 1)[0, :7]]
    reducer.begin(lane, 1.0)
    for (_, parameter), gradient in zip(parameters, local, strict=True):
        parameter.grad = gradient.clone()
    _finish(reducer, lane, votes, 2.0)
    for (_, parameter), gradient in zip(parameters, local, strict=True):
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, _sum(votes, gradient) * 0.5)
    if rank.rank == 0:
        for _, parameter in parameters:
            parameter.grad = None
    reducer.begin(lane, 1.0)
    _finish(reducer, lane, votes, 2.0)
    assert parameters[0][1].grad is not None and parameters[0][1].grad.dtype == torch.float32


def test_gradients_in_another_dtype_than_their_parameter_keep_their_precision() -> None:
    run_ranks(_other_dtype, 2)


def _fsdp(rank: Rank) -> None:
    """Two replicas of two shards each: ranks 0, 1 and ranks 2, 3."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replica, shard = divmod(rank.rank, 2)
    dist.init_process_group("gloo", store=rank.store(f"inside-{replica}"), rank=shard, world_size=2)
    lane = rank.lane(1, prefix=f"shard{shard}", rank=replica, world_size=2)
    votes = rank.lane(2, prefix=f"shard{shard}", rank=replica, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for settings in ({}, {"mp_policy": policy}):
        torch.manual_seed(0)
        model, reference = Net(), Net()
        reference.load_state_dict(model.state_dict())
        for either in (model, reference):
            for layer in [*either.layers, either]:
                fully_shard(layer, mesh=mesh, **settings)
        reducer = GradientReducer(list(model.named_parameters()), bucket_bytes=1024, first_bucket_bytes=256)
        for step in range(5):
            for either in (model, reference):
                either.zero_grad()
                if either is model:
                    reducer.begin(lane, 1.0)
                order = (0, 1, 2, 3, 4 + replica) if step == 4 else (0, 1, 2, 3, 4, 5)
                for part in range(2):
                    either.set_requires_gradient_sync(step < 2 or part == 1)
                    either(data(rank.rank, step, part), order).square().sum().backward()
                if either is model and step in (1, 3):
                    assert reducer._next == len(reducer._buckets) > 3
            assert _finish(reducer, lane, votes, 2.0) == 0
            for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
                present = _sum(votes, torch.tensor([float(want.grad is not None)]))
                local = torch.zeros_like(want.to_local()) if want.grad is None else want.grad.to_local()
                assert float(present) > 0 and got.grad is not None, name
                assert got.grad.placements == got.placements and got.grad.shape == got.shape
                assert torch.equal(got.grad.to_local(), _sum(votes, local) * 0.5), name
    dist.destroy_process_group()


def test_fsdp2_shards_are_averaged_between_replicas() -> None:
    run_ranks(_fsdp, 4)


def _retry(rank: Rank) -> tuple[float, list[float]]:
    """The last rank dies in mid-allreduce; the others post again on a new lane."""
    lane = rank.lane(1)
    model = nn.Sequential(*[nn.Linear(500, 500) for _ in range(6)])
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    reducer = GradientReducer(list(model.named_parameters()), bucket_bytes=1_000_000, first_bucket_bytes=1)

    def backward() -> None:
        model.zero_grad()
        model(torch.full((4, 500), rank.rank + 1.0)).sum().backward()

    backward()
    reducer.begin(lane, 1.0)
    wait_ended(reducer.post(lane).operations)
    reducer.write_back(3.0)
    reducer.begin(lane, 1.0)
    if rank.rank == 2:
        # posts a part of it, and is then killed
        wait_ended([lane.allreduce(torch.ones(reducer._buckets[0].bucket.elements))])
        rank.say("in the middle")
        rank.hear()
    backward()
    first = reducer.post(lane)
    old_staging = [staged._flat for staged in reducer._buckets]
    rank.say("posted")
    wait_ended(first.operations)
    noticed = time.time()
    assert any(operation.error is not None for operation in first.operations)
    local = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    fresh = rank.lane(2, world_size=2)
    lane.retire()
    second = reducer.post(fresh)
    for staged, old, operation in zip(reducer._buckets, old_staging, first.operations, strict=False):
        assert operation.error is None or staged._flat is not old
    wait_ended(second.operations)
    assert all(operation.error is None for operation in second.operations)
    for parameter, before in zip(model.parameters(), local, strict=True):
        assert torch.equal(parameter.grad, before)  # type: ignore[arg-type]
    reducer.write_back(2.0)
    votes = rank.lane(3, world_size=2)
    for parameter, before in zip(model.parameters(), local, strict=True):
        assert torch.equal(parameter.grad, _sum(votes, before) * 0.5)  # type: ignore[arg-type]
    return noticed, [float(p.grad.sum()) for p in model.parameters()]  # type: ignore[union-attr]


def test_a_death_in_mid_allreduce_costs_no_gradient() -> None:
    with start_ranks(_retry, 3) as ranks:
        assert ranks.word(2) == "in the middle"
        assert ranks.word(0) == ranks.word(1) == "posted"
        killed = time.time()
        ranks.signal(2, signal.SIGKILL)
        (noticed_0, sums_0), (noticed_1, sums_1) = ranks.result(0), ranks.result(1)
        assert sums_0 == sums_1
        assert max(noticed_0, noticed_1) - killed < 2


def _small() -> tuple[nn.Module, GradientReducer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, GradientReducer(list(model.named_parameters()), bucket_bytes=1, first_bucket_bytes=1)


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def test_staging_is_never_reused_while_an_operation_may_write_into_it() -> None:
    model, reducer = _small()
    pending, broken, good = HeldLane(), HeldLane(), HeldLane()
    _backward(model)
    reducer.begin(pending, 1.0)
    reducer.post(pending)
    reducer.post(broken)
    assert not {id(tensor) for tensor, _ in pending.started} & {id(tensor) for tensor, _ in broken.started}
    broken.end(LaneError("peer left"))
    reducer.post(good)
    assert not {id(tensor) for tensor, _ in broken.started} & {id(tensor) for tensor, _ in good.started}
    good.end()
    reducer.again()
    reducer.post(good)
    used = [id(tensor) for tensor, _ in good.started]
    assert used[:4] == used[4:]  # ended well: the same memory


def test_nothing_is_launched_after_the_lane_broke_or_without_one() -> None:
    model, reducer = _small()
    lane = HeldLane()
    reducer.begin(lane, 1.0)
    _backward(model)
    reducer.post(lane)  # learn
    lane.end()
    lane.forget()
    reducer.begin(lane, 1.0)
    lane.error = LaneError("gone")
    _backward(model)
    posted = reducer.post(lane)
    assert not lane.started
    assert all(operation.error is lane.error for operation in posted.operations)
    reducer.begin(None, 1.0)
    _backward(model)
    assert not lane.started
    good = HeldLane()
    assert len(reducer.post(good).operations) == len(good.started) == 4


def test_hooks_do_nothing_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reducer = _small()
    lane = HeldLane()
    reducer.begin(lane, 1.0)
    _backward(model)
    reducer.post(lane)
    lane.end()
    lane.forget()
    reducer.begin(lane, 1.0)
    monkeypatch.setattr(reducer._streams, "capturing", lambda: True)
    _backward(model)
    assert not lane.started
    assert not reducer.post(lane).stale
    assert len(lane.started) == 4


def test_alone_the_gradient_is_left_bit_for_bit() -> None:
    model, reducer = _small()
    lane = GlooBackend().create(LaneSpec(HashStore(), 0, 1, 1, 1000))
    reducer.begin(lane, 3.0)
    _backward(model)
    before = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]  # type: ignore[union-attr]
    assert reducer.post(lane).operations == ()
    reducer.write_back(3.0)
    for parameter, (same, content) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is same
        assert torch.equal(content, same)  # type: ignore[arg-type]


def test_a_refused_step_leaves_no_gradient_and_no_buffer_behind() -> None:
    norm = nn.BatchNorm1d(4)
    local = nn.BatchNorm1d(4)
    reducer = GradientReducer(
        list(norm.named_parameters()) + list(local.named_parameters()),
        buffers=list(norm.named_buffers()),
        local_buffers=list(local.named_buffers()),
    )
    before = [buffer.clone() for buffer in [*norm.buffers(), *local.buffers()]]
    for _ in range(2):
        lane = HeldLane()
        reducer.begin(lane, 1.0)
        local(norm(torch.randn(8, 4))).sum().backward()
        reducer.post(lane)
        reducer.begin(None, 0.0)  # an objection in the middle of the step
        reducer.discard()
        assert all(
            torch.equal(*pair) for pair in zip(before, [*norm.buffers(), *local.buffers()], strict=True)
        )
        assert norm.weight.grad is None and local.bias.grad is None


def _buffers(rank: Rank) -> list[float]:
    lane, votes = rank.lane(1), rank.lane(2)
    norm = nn.BatchNorm1d(4)
    reducer = GradientReducer(list(norm.named_parameters()), buffers=list(norm.named_buffers()))
    weights = [1.0, 3.0, 0.0]
    reducer.begin(lane, weights[rank.rank])
    if rank.rank < 2:
        norm(torch.full((8, 4), float(rank.rank + 1)))
    local = norm.running_mean[0].clone()  # type: ignore[index]
    _finish(reducer, lane, votes, 4.0)
    means = _sum(votes, torch.stack([local * weights[rank.rank]])) / 4
    torch.testing.assert_close(norm.running_mean[:1], means)  # type: ignore[index]
    norm.running_mean.zero_()  # type: ignore[union-attr]
    reducer.caught_up()
    torch.testing.assert_close(norm.running_mean[:1], means)  # type: ignore[index]
    return [float(norm.running_mean[0]), float(norm.num_batches_tracked)]  # type: ignore[index, arg-type]


def test_buffers_are_averaged_over_contributors_and_counters_kept_equal() -> None:
    results = run_ranks(_buffers, 3)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == 1


def test_a_non_finite_gradient_is_noticed_only_on_request() -> None:
    for check in (False, True):
        model = nn.Linear(4, 4)
        reducer = GradientReducer(list(model.named_parameters()), check_finite=check)
        for world_size in (1, 2):
            for value in (1.0, float("inf"), float("nan")):
                lane = HeldLane(world_size)
                reducer.begin(lane, 1.0)
                model.zero_grad()
                model(torch.full((2, 4), value)).sum().backward()
                assert reducer.post(lane).finite == (not check or value == 1.0)
                lane.end()


def test_what_cannot_be_reduced_is_said_on_the_training_thread() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    reducer = GradientReducer(list(embedding.named_parameters()))
    for _ in range(2):
        lane = HeldLane()
        reducer.begin(lane, 1.0)
        embedding.zero_grad()
        embedding(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ValueError, match=r"gradient of weight is torch.sparse_coo: use dense"):
            reducer.post(lane)
    with pytest.raises(ValueError, match="no trainable parameter"):
        GradientReducer([("w", nn.Parameter(torch.ones(1), requires_grad=False))])
    with pytest.raises(ValueError, match=r"buffer c has dtype torch.complex64.*declare it local"):
        GradientReducer(
            list(nn.Linear(1, 1).named_parameters()), buffers=[("c", torch.ones(1, dtype=torch.complex64))]
        )


def test_held_hooks_only_count_and_flush_posts_the_rest() -> None:
    model, reducer = _small()
    for step in range(3):
        lane = HeldLane()
        reducer.begin(lane, 1.0)
        with reducer.held():
            _backward(model)
            reducer.flush()
            assert not lane.started
        _backward(model)
        reducer.flush()
        assert len(lane.started) == 4, step
        posted = reducer.post(lane)
        assert not posted.stale and len(lane.started) == 4
        lane.end()


def test_the_digest_names_the_layout_and_the_memory_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _, reducer = _small()
    assert f"staging takes {reducer.staging_bytes} bytes" in caplog.text
    assert reducer.staging_bytes == 4 * (2 * 20 + 4)
    assert _small()[1].digest() == reducer.digest()
    other = GradientReducer(list(nn.Linear(4, 4).named_parameters()))
    assert other.digest() != reducer.digest()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")
def test_on_a_gpu_packing_follows_the_gradients_streams() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda()
    reducer = GradientReducer(
        list(model.named_parameters()), bucket_bytes=1 << 20, first_bucket_bytes=1, check_finite=True
    )
    for step in range(3):
        lane = HeldLane()
        model.zero_grad()
        reducer.begin(lane, 1.0)
        model(torch.full((64, 512), step + 1.0, device="cuda")).sum().backward()
        assert reducer.post(lane).finite
        torch.cuda.synchronize()
        before = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        for tensor, _ in lane.started:
            tensor.mul_(2)
        torch.cuda.synchronize()
        lane.end()
        reducer.write_back(2.0)
        for parameter, local in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, local)  # type: ignore[arg-type]
