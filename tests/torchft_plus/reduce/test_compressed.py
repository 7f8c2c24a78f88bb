from __future__ import annotations

import copy
import hashlib
import random
import signal
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import Rank, run_ranks, start_ranks, wait_ended
from reduction_cases import Net, data
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import ReduceOp

from torchft_plus.process_group.gloo import GlooBackend
from torchft_plus.process_group.lane import Lane, LaneSpec
from torchft_plus.reduce.codec import NAMES, Int8Codec, codec
from torchft_plus.reduce.compressed import CompressedReduction, Parts
from torchft_plus.reduce.recorded import RecordedOperations
from torchft_plus.reduce.reducer import GradientReducer

BOUNDS = {"bf16": 2.0**-7, "int8": 1 / 100, "fp8": 2.0**-3}
"""Error of a sum of two or more, relative to the largest magnitudes."""


@given(st.integers(0, 5000), st.integers(0, 40), st.integers(2, 17), st.sampled_from([1, 256]))
def test_parts_cover_everything_once_at_multiples_of_a_block(
    elements: int, exact: int, members: int, block: int
) -> None:
    parts = Parts(elements, exact, members, block)
    covered = [index for rank in range(members) for index in range(elements)[parts.of(rank)]]
    assert covered == list(range(elements))
    assert [i for rank in range(members) for i in range(exact)[parts.exact_of(rank)]] == list(range(exact))
    assert all(
        parts.of(rank).start % block == 0 or parts.of(rank).start == elements for rank in range(members)
    )
    assert parts.part * members < elements + block * members


def _flat(rank: int, elements: int, exact: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + elements)
    values = torch.randn(elements, generator=generator)
    return torch.cat([values, torch.arange(exact) * 16_777_216.0 + rank])


def _several(rank: Rank, name: str) -> str:
    """Many reductions in flight, with plain ones between them."""
    lane = rank.lane()
    digest = hashlib.sha256()
    shapes = [(0, 0), (0, 3), (1, 1), (255, 2), (257, 0), (5000, 7), (70_001, 30), (3, 0)]
    flats = [_flat(rank.rank, *shape) for shape in shapes]
    operations, plain = [], []
    for index, (flat, (_, exact)) in enumerate(zip(flats, shapes, strict=True)):
        operations.append(CompressedReduction(lane, codec(name), flat, exact, last=index in (3, 7)))
        if index % 3 == 0:
            plain.append(torch.full((50,), float(rank.rank + index)))
            operations.append(lane.allreduce(plain[-1]))
    wait_ended(operations)
    assert [operation.error for operation in operations] == [None] * len(operations)
    for flat, (elements, exact) in zip(flats, shapes, strict=True):
        inputs = [_flat(peer, elements, exact) for peer in range(rank.size)]
        expected = torch.stack(inputs).sum(0)
        assert torch.equal(flat[elements:], expected[elements:])  # exact
        largest = sum(float(one[:elements].abs().max()) if elements else 0.0 for one in inputs)
        assert bool(((flat - expected)[:elements].abs() <= BOUNDS[name] * largest).all())
        digest.update(flat.numpy().tobytes())
    for index, tensor in zip((0, 3, 6), plain, strict=True):
        assert float(tensor[0]) == sum(range(rank.size)) + index * rank.size
    lane.retire()
    return digest.hexdigest()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_sum_is_identical_on_all_members_bit_for_bit(name: str, size: int) -> None:
    assert len(set(run_ranks(_several, size, name))) == 1


class _Dawdling(Int8Codec):
    """Takes its time, another on each member."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        time.sleep(self._chance.choice([0, 0, 0.004, 0.015]))
        super().decode(payload, values)


def _at_other_speeds(rank: Rank) -> str:
    lane = rank.lane()
    one, chance, digest = _Dawdling(rank.rank), random.Random(100 + rank.rank), hashlib.sha256()
    for _ in range(3):
        flats = [_flat(rank.rank, 600 + 10 * index, 2) for index in range(8)]
        operations = []
        for index, flat in enumerate(flats):
            operations.append(CompressedReduction(lane, one, flat, 2, last=index == 7))
            if index % 3 == 2:
                operations.append(lane.allreduce(torch.ones(5)))
            time.sleep(chance.choice([0, 0, 0.01, 0.03]))
        wait_ended(operations)
        assert [operation.error for operation in operations] == [None] * len(operations)
        for index, flat in enumerate(flats):
            inputs = torch.stack([_flat(peer, 600 + 10 * index, 2) for peer in range(rank.size)]).sum(0)
            assert torch.equal(flat[-2:], inputs[-2:])
            assert float((flat - inputs).abs().max()) < 0.2
            digest.update(flat.numpy().tobytes())
    lane.retire()
    return digest.hexdigest()


def test_members_of_other_speeds_keep_the_order() -> None:
    assert len(set(run_ranks(_at_other_speeds, 3))) == 1


def _trained(rank: Rank, name: str) -> list[str]:
    """Weights 1, 0.5 and 0; a layer that nobody uses, one that one uses; parameters of two dtypes."""
    lane = rank.lane(1)
    weights = [1.0, 0.5, 0.0, 1.0]
    weight, total = weights[rank.rank], sum(weights[: rank.size])
    torch.manual_seed(0)
    model = Net()
    model.head.bfloat16()
    reducer = GradientReducer(
        list(model.named_parameters()),
        bucket_bytes=2048,
        first_bucket_bytes=512,
        codec=codec(name),
        error_feedback=True,
    )
    digests = []
    for step in range(3):
        model.zero_grad()
        reducer.begin(lane, weight)
        reference: list[nn.Module] = []
        for peer in range(rank.size):
            one = copy.deepcopy(model)
            order = (0, 1, 2, 4) if peer == 0 else (0, 1, 4)
            for either in [one, *([model] if peer == rank.rank and weight else [])]:
                x = data(peer, step)
                for index in order:
                    x = torch.tanh(either.layers[index](x))  # type: ignore[index, operator]
                either.head(x.bfloat16()).float().square().sum().backward()  # type: ignore[operator]
            reference.append(one)
        posted = reducer.post(lane)
        wait_ended(posted.operations)
        assert all(operation.error is None for operation in posted.operations)
        reducer.write_back(total)
        digest = hashlib.sha256()
        for index, (key, parameter) in enumerate(model.named_parameters()):
            inputs = [list(one.parameters())[index].grad for one in reference]
            if all(gradient is None or weights[peer] == 0 for peer, gradient in enumerate(inputs)):
                assert parameter.grad is None, key
                continue
            assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype, key
            digest.update(parameter.grad.float().numpy().tobytes())
            digest.update(key.encode())
            expected = sum(
                weights[peer] / total * gradient.float()
                for peer, gradient in enumerate(inputs)
                if gradient is not None
            )
            largest = max(
                float(one.grad.abs().max())
                for g in reference
                for one in g.parameters()
                if one.grad is not None
            )
            assert float((parameter.grad.float() - expected).abs().max()) <= 2 * BOUNDS[name] * largest, key
        digests.append(digest.hexdigest())
    assert model.layers[3].weight.grad is None
    lane.retire()
    return digests


@pytest.mark.parametrize(("name", "size"), [("bf16", 3), ("int8", 2), ("int8", 4), ("fp8", 3)])
def test_gradients_are_averaged_with_weights_and_equal_everywhere(name: str, size: int) -> None:
    results = run_ranks(_trained, size, name)
    assert all(result == results[0] for result in results)


def _sharded(rank: Rank) -> str:
    """Two replicas of two shards each: the local shards are summed, and stay DTensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    replica, shard = divmod(rank.rank, 2)
    dist.init_process_group("gloo", store=rank.store(f"inside-{replica}"), rank=shard, world_size=2)
    lane = rank.lane(1, prefix=f"shard{shard}", rank=replica, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = Net()
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh)
    reducer = GradientReducer(
        list(model.named_parameters()), bucket_bytes=2048, codec=Int8Codec(), error_feedback=True
    )
    digest = hashlib.sha256()
    for step in range(3):
        model.zero_grad()
        reducer.begin(lane, 1.0)
        model(data(rank.rank, step), (0, 1, 2, 3, 4 + replica)).square().sum().backward()
        posted = reducer.post(lane)
        wait_ended(posted.operations)
        assert all(operation.error is None for operation in posted.operations)
        reducer.write_back(2.0)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None and gradient.placements == parameter.placements, name  # type: ignore[union-attr]
            digest.update(gradient.to_local().numpy().tobytes())  # type: ignore[union-attr]
    dist.destroy_process_group()
    return digest.hexdigest()


def test_shards_are_equal_on_all_replicas() -> None:
    results = run_ranks(_sharded, 4)
    assert results[:2] == results[2:]


def _averages_of_a_constant(rank: Rank, name: str, error_feedback: bool) -> float:
    """Error of the mean over 40 steps, relative to the largest gradient."""
    lane = rank.lane(1)
    parameter = nn.Parameter(torch.zeros(1500))
    constant = torch.randn(1500, generator=torch.Generator().manual_seed(rank.rank))
    reducer = GradientReducer([("w", parameter)], codec=codec(name), error_feedback=error_feedback)
    total, expected, steps = torch.zeros(1500), torch.zeros(1500), 40
    for peer in range(rank.size):
        expected += torch.randn(1500, generator=torch.Generator().manual_seed(peer)) / rank.size
    for step in range(steps):
        parameter.grad = constant.clone()
        reducer.begin(lane, 1.0)
        wait_ended(reducer.post(lane).operations)
        first = reducer._buckets[0].views()[0].clone()
        if step % 3 == 1:  # again, as after a fault: the very same result
            reducer.again()
            wait_ended(reducer.post(lane).operations)
            assert torch.equal(first, reducer._buckets[0].views()[0])
        if step % 7 == 6:  # refused: leaves no trace
            reducer.discard()
            parameter.grad = constant.clone()
            reducer.begin(lane, 1.0)
            wait_ended(reducer.post(lane).operations)
            assert torch.equal(first, reducer._buckets[0].views()[0])
        reducer.write_back(float(rank.size))
        assert parameter.grad is not None
        total += parameter.grad
    return float((total / steps - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_makes_the_mean_of_a_constant_gradient_right(name: str) -> None:
    without = run_ranks(_averages_of_a_constant, 2, name, False)
    fed_back = run_ranks(_averages_of_a_constant, 2, name, True)
    assert without[0] == without[1] and fed_back[0] == fed_back[1]
    assert fed_back[0] < without[0] / 8


def _retry(rank: Rank, stage: str) -> list[str]:
    """The last rank dies within a reduction; the others reduce again, and so does a reducer that never saw the fault."""
    lane = rank.lane(1)
    torch.manual_seed(rank.rank)
    gradients = [torch.randn(300, 500) for _ in range(4)]

    def reducer() -> tuple[list[nn.Parameter], GradientReducer]:
        parameters = [nn.Parameter(torch.zeros(300, 500)) for _ in range(4)]
        named = [(f"w{index}", parameter) for index, parameter in enumerate(parameters)]
        return parameters, GradientReducer(
            named, bucket_bytes=600_000, first_bucket_bytes=600_000, codec=Int8Codec(), error_feedback=True
        )

    def run(parameters: list[nn.Parameter], one: GradientReducer, lane: Lane, total: float) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        one.begin(lane, 1.0)
        wait_ended(one.post(lane).operations)
        one.write_back(total)

    parameters, disturbed = reducer()
    others, undisturbed = reducer()
    run(parameters, disturbed, lane, 3.0)
    run(others, undisturbed, lane, 3.0)  # both have a residual now
    if rank.rank == 2:
        if stage == "second":  # does the first stage of the first buckets, and is killed before the second
            real = lane.all_gather
            lane.all_gather = lambda *a, **k: (rank.say("killed here"), rank.hear(), real(*a, **k))[2]  # type: ignore[method-assign]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            disturbed.begin(lane, 1.0)
            disturbed.post(lane)
        else:
            rank.say("killed here")
        rank.hear()
        return []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    disturbed.begin(lane, 1.0)
    posted = disturbed.post(lane)
    rank.say("posted")
    wait_ended(posted.operations)
    assert any(operation.error is not None for operation in posted.operations)
    fresh = rank.lane(2, world_size=2)
    lane.retire()
    wait_ended(disturbed.post(fresh).operations)
    disturbed.write_back(2.0)
    run(others, undisturbed, fresh, 2.0)
    for one, other in zip(parameters, others, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    run(parameters, disturbed, fresh, 2.0)  # the residuals, too, are the same
    run(others, undisturbed, fresh, 2.0)
    result = []
    for one, other in zip(parameters, others, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
        result.append(hashlib.sha256(one.grad.numpy().tobytes()).hexdigest())
    return result


@pytest.mark.parametrize("stage", ["first", "second"])
def test_a_death_in_either_stage_costs_nothing(stage: str) -> None:
    with start_ranks(_retry, 3, stage) as ranks:
        assert ranks.word(2) == "killed here"
        assert ranks.word(0) == ranks.word(1) == "posted"
        killed = time.time()
        ranks.signal(2, signal.SIGKILL)
        assert ranks.result(0) == ranks.result(1)
        assert time.time() - killed < 10


def _pair(timeout_ms: int = 20_000) -> list[Lane]:
    store = HashStore()
    lanes: dict[int, Lane] = {}

    def build(rank: int) -> None:
        lanes[rank] = GlooBackend().create(LaneSpec(store, rank, 2, 7, timeout_ms))

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [lanes[0], lanes[1]]


def test_an_abort_ends_a_reduction_whose_second_stage_has_no_place_yet() -> None:
    lanes = _pair()
    reductions = [CompressedReduction(lane, Int8Codec(), torch.ones(1000), 0, last=False) for lane in lanes]
    heard: list[str] = []
    reductions[0].add_done_callback(lambda: heard.append("ended"))
    time.sleep(0.1)
    assert not any(reduction.poll() for reduction in reductions)  # waits for the next, or the last
    lanes[0].abort("for the test")
    wait_ended(reductions, 10)
    assert str(reductions[0].error) == "for the test" and heard == ["ended"]
    for lane in lanes:
        lane.retire()


class _BrokenCodec(Int8Codec):
    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        raise MemoryError("no memory left")


def test_a_stage_that_cannot_be_computed_breaks_the_lane() -> None:
    lanes = _pair()
    codecs = [_BrokenCodec(), Int8Codec()]
    reductions = [
        CompressedReduction(lane, one, torch.ones(1000), 0, last=True)
        for lane, one in zip(lanes, codecs, strict=True)
    ]
    wait_ended(reductions, 10)
    assert "no memory left" in str(reductions[0].error)
    assert reductions[1].error is not None


def test_a_gradient_that_is_not_finite_is_seen_and_leaves_no_residual() -> None:
    lanes = _pair()
    parameters = [nn.Parameter(torch.zeros(600)) for _ in lanes]
    reducers = [
        GradientReducer([("w", one)], codec=Int8Codec(), error_feedback=True, check_finite=True)
        for one in parameters
    ]
    for bad in (float("inf"), float("nan"), 1.0):
        finite = []
        posted = []
        for index, (lane, parameter, reducer) in enumerate(zip(lanes, parameters, reducers, strict=True)):
            parameter.grad = torch.ones(600)
            if index == 0:
                parameter.grad[300] = bad
            reducer.begin(lane, 1.0)
            posted.append(reducer.post(lane))
            finite.append(posted[-1].finite)
        wait_ended([operation for one in posted for operation in one.operations])
        assert finite == [bad == 1.0, True]
        for parameter, reducer in zip(parameters, reducers, strict=True):
            reducer.write_back(2.0)
            assert parameter.grad is not None
            assert bool(torch.isfinite(parameter.grad[300])) == (bad == 1.0)
            assert parameter.grad[0] == 1.0
    for lane in lanes:
        lane.retire()


def test_who_has_become_a_copy_drops_what_it_had_not_sent() -> None:
    lanes = _pair()
    gradient = torch.randn(600, generator=torch.Generator().manual_seed(1))
    results = []
    parameters = [nn.Parameter(torch.zeros(600)) for _ in lanes]
    reducers = [GradientReducer([("w", one)], codec=Int8Codec(), error_feedback=True) for one in parameters]
    for step in range(3):
        posted = []
        for lane, parameter, reducer in zip(lanes, parameters, reducers, strict=True):
            parameter.grad = gradient.clone()
            if step == 2:
                reducer.caught_up()
            reducer.begin(lane, 1.0)
            posted += reducer.post(lane).operations
        wait_ended(posted)
        for reducer in reducers:
            reducer.write_back(2.0)
        assert parameters[0].grad is not None and parameters[1].grad is not None
        assert torch.equal(parameters[0].grad, parameters[1].grad)
        results.append(parameters[0].grad.clone())
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])
    for lane in lanes:
        lane.retire()


def test_alone_nothing_is_quantised() -> None:
    lane = GlooBackend().create(LaneSpec(HashStore(), 0, 1, 1, 1000))
    parameter = nn.Parameter(torch.zeros(5))
    reducer = GradientReducer([("w", parameter)], codec=Int8Codec(), error_feedback=True)
    gradient = torch.tensor([1.0, 1e-5, 3.0, -7e-9, 0.1])
    parameter.grad = gradient.clone()
    reducer.begin(lane, 1.0)
    assert reducer.post(lane).operations == ()
    reducer.write_back(1.0)
    assert torch.equal(parameter.grad, gradient)
    recorded = RecordedOperations()
    recorded.begin(lane, 1.0)
    tensor = gradient.clone()
    assert recorded.start(tensor, ReduceOp.AVG, Int8Codec()).wait()
    assert torch.equal(tensor, gradient)


def _recorded(rank: Rank) -> list[list[float]]:
    lane = rank.lane(1)
    recorded = RecordedOperations()
    recorded.begin(lane, 0.0 if rank.rank == 1 else 1.0)
    tensors = [torch.full((3, 2), rank.rank + 1.0), torch.full((300,), rank.rank + 1.0, dtype=torch.bfloat16)]
    works = [
        recorded.start(tensors[0], ReduceOp.AVG, Int8Codec()),
        recorded.start(tensors[1], ReduceOp.SUM, Int8Codec()),
    ]
    assert all(work.wait() for work in works)
    wait_ended(recorded.post(lane).operations)
    recorded.write_back(2.0)
    lane.retire()
    return [tensor.flatten()[:6].tolist() for tensor in tensors]


def test_a_recorded_reduction_may_be_quantised() -> None:
    results = run_ranks(_recorded, 3)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == pytest.approx([2.0] * 6, rel=1e-2)
    assert results[0][1] == pytest.approx([4.0] * 6, rel=1e-2)
    with pytest.raises(ValueError, match=r"a quantised MAX of torch.float32 is not offered"):
        RecordedOperations().start(torch.ones(1), ReduceOp.MAX, Int8Codec())
    with pytest.raises(ValueError, match=r"a quantised SUM of torch.int64 is not offered"):
        RecordedOperations().start(torch.ones(1, dtype=torch.int64), ReduceOp.SUM, Int8Codec())


def test_the_digest_names_the_codec() -> None:
    parameters = list(nn.Linear(4, 4).named_parameters())
    digests = [
        GradientReducer(parameters, codec=one, error_feedback=feedback).digest()
        for one, feedback in [(None, False), (Int8Codec(), False), (codec("fp8"), False), (Int8Codec(), True)]
    ]
    assert len(set(digests)) == 4
    assert GradientReducer(parameters, codec=Int8Codec()).digest() == digests[1]
    with pytest.raises(ValueError, match="error_feedback is set without a codec"):
        GradientReducer(parameters, error_feedback=True)
