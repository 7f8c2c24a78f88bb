"""torchft's questions, answered from the quorum core: the pure adapter, scene by scene and under arbitrary schedules."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torchft_driver import Question, TorchftDriver

from lighthouse.core.words import CoreConfig
from lighthouse.timeouts import Timeouts
from lighthouse.torchft.words import RETURN_GRACE_MS, Refusal, core_config


def test_the_first_quorum_waits_for_min_replicas_and_for_those_who_beat() -> None:
    driver = TorchftDriver(min_replicas=2)
    a = driver.ask("a")
    assert a.open and "min_replicas" in driver.waiting
    driver.beat("c")
    b = driver.ask("b")
    assert a.open and b.open, "c is there and has not asked"
    c = driver.ask("c")
    assert a.members == b.members == c.members == "a b c"
    assert a.answer.quorum_id > 0


def test_one_replica_may_begin_alone_at_once() -> None:
    assert TorchftDriver(min_replicas=1).ask("a").members == "a"


def test_a_standing_quorum_answers_when_all_members_have_asked_with_the_steps_of_now() -> None:
    driver = TorchftDriver()
    quorum = driver.form("a b c")
    a, b = driver.ask_all("a b", 1)
    assert a.open and b.open, "the answer names everybody's step"
    c = driver.ask("c", 1)
    assert a.answer.quorum_id == quorum.id
    assert a.answer is c.answer
    assert a.steps == [1, 1, 1]


def test_a_thousand_steps_store_nothing() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    record = driver.record
    for step in range(1, 1_000):
        driver.ask_all("a b", step)
    assert driver.record is record
    assert len(driver.answers) == 1_000


def test_a_newcomer_joins_at_the_next_step_of_the_members() -> None:
    driver = TorchftDriver()
    first = driver.form("a b", step=5)
    a = driver.ask("a", 6)
    c = driver.ask("c", 0)
    assert a.open and c.open, "b is still in its step"
    b = driver.ask("b", 6)
    assert a.members == b.members == c.members == "a b c"
    assert a.answer.quorum_id > first.id
    assert a.steps == [6, 6, 0]
    assert driver.quorum.base.step == 6
    assert [m.contributor for m in driver.quorum.members] == [True, True, False]


def test_survivors_go_on_as_soon_as_a_broken_connection_did_not_come_back() -> None:
    driver = TorchftDriver()
    driver.form("a b c")
    a, b = driver.ask_all("a b", 1)
    driver.die("c")
    driver.wait(RETURN_GRACE_MS - 1, "a b")
    assert a.open, "its manager may connect again"
    driver.wait(2, "a b")
    assert a.members == b.members == "a b"


def test_a_connection_that_comes_back_in_time_costs_nothing() -> None:
    driver = TorchftDriver()
    first = driver.form("a b")
    driver.die("b")
    driver.wait(150)
    driver.beat("b")
    driver.wait(1_000, "a b")
    a, _ = driver.ask_all("a b", 1)
    assert a.answer.quorum_id == first.id


def test_the_break_of_an_older_connection_is_no_death() -> None:
    driver = TorchftDriver()
    first = driver.form("a b")
    old = driver._last_beat["b"]
    driver.beat("b")
    driver._last_beat["b"], new = old, driver._last_beat["b"]
    driver.die("b")
    driver._last_beat["b"] = new
    driver.wait(1_000, "a")
    a, _ = driver.ask_all("a b", 1)
    assert a.answer.quorum_id == first.id


def test_who_is_silent_for_the_limit_is_lost_and_may_come_back() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    a = driver.ask("a", 1)
    driver.wait(4_500, "a")
    assert a.open
    driver.wait(1_000, "a")
    assert a.members == "a"
    driver.beat("b")  # it was frozen
    b = driver.ask("b", 1)
    assert b.open
    assert driver.ask("a", 2).members == b.members == "a b"


def test_who_beats_and_does_not_ask_holds_the_others_up_for_the_join_timeout_only() -> None:
    driver = TorchftDriver(join_timeout_ms=20_000)
    driver.form("a b")
    a = driver.ask("a", 1)
    driver.wait(19_000, "a b")
    assert a.open
    driver.wait(2_000, "a b")
    assert a.members == "a"
    b = driver.ask("b", 1)
    assert driver.ask("a", 2).members == b.members == "a b", "it moves again"


def test_a_failed_commit_gets_a_new_id_for_the_same_members() -> None:
    driver = TorchftDriver()
    first = driver.form("a b")
    a = driver.ask("a", 0, failures=1)
    b = driver.ask("b", 1)
    assert a.members == b.members == "a b"
    assert a.answer.quorum_id > first.id
    again = driver.ask_all("a b", 1)[0]
    assert again.answer.quorum_id == a.answer.quorum_id


def test_repeated_failures_leave_nobody_out() -> None:
    """Rule L8 is not theirs: what their managers do after some failures in a row is their own setting."""
    driver = TorchftDriver()
    driver.form("a b c")
    for attempt in range(1, 8):
        questions = [driver.ask(name, 0, failures=attempt) for name in "abc"]
        assert {q.members for q in questions} == {"a b c"}


def test_shrink_only_keeps_newcomers_waiting() -> None:
    driver = TorchftDriver()
    first = driver.form("a b")
    a = driver.ask("a", 1, shrink=True)
    c = driver.ask("c")
    driver.ask("b", 1)
    assert a.answer.quorum_id == first.id and c.open
    driver.ask("a", 2, shrink=True)
    driver.ask("b", 2)
    assert c.open
    driver.ask("a", 3)
    driver.ask("b", 3)
    assert c.members == "a b c"


def test_shrink_only_of_the_dead_keeps_nobody_out() -> None:
    driver = TorchftDriver()
    driver.form("a")
    driver.ask("a", 1, shrink=True)
    c = driver.ask("c")
    driver.die("a")
    driver.wait(400, "c")
    assert c.members == "c"


def test_a_newcomer_holds_nothing_whatever_step_it_says() -> None:
    driver = TorchftDriver()
    driver.form("a")
    c = driver.ask("c", 1)
    driver.ask("a", 1)
    assert c.members == "a c"
    assert [m.contributor for m in driver.quorum.members] == [True, False]


def test_the_core_knows_who_waits_and_who_trains() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    driver.ask("a", 1)
    peers = {p.process.replica_id: p.position for p in driver.core.view(driver.now_ms).peers}
    phases = {name: position.progress.phase for name, position in peers.items() if position is not None}
    assert phases == {"a": "reduce", "b": "train"}


def test_shrink_only_takes_back_an_ask_that_is_under_way() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    c = driver.ask("c")
    a = driver.ask("a", 1, shrink=True)
    driver.ask("b", 1)
    assert a.members == "a b" and c.open


def test_a_withdrawn_question_is_no_ask() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    c = driver.ask("c")
    driver.withdraw(c)
    assert driver.ask_all("a b", 1)[0].members == "a b"
    assert not c.open


def test_a_withdrawn_question_of_a_member_is_awaited_again() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    b = driver.ask("b", 1)
    driver.withdraw(b)
    a = driver.ask("a", 1)
    assert a.open
    assert driver.ask("b", 1).members == a.members == "a b"


def test_a_repeated_question_ends_the_older_call() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    older = driver.ask("a", 1)
    newer = driver.ask("a", 1)
    assert isinstance(older.outcome, Refusal)
    driver.ask("b", 1)
    assert newer.members == "a b"


def test_all_are_lost_and_new_processes_begin_again_at_once() -> None:
    driver = TorchftDriver(min_replicas=2)
    first = driver.form("a b", step=500)
    driver.die("a")
    driver.die("b")
    driver.wait(400)
    c, d = driver.ask_all("c d", 0)
    assert c.members == d.members == "c d"
    assert c.answer.quorum_id > first.id
    assert any("500 steps are lost" in line for line in driver.core.view(driver.now_ms).story)


def test_the_holder_of_the_greatest_step_dies_and_the_others_go_on_from_theirs() -> None:
    """torchft's managers would; the quorum core alone would wait for the holder."""
    driver = TorchftDriver()
    driver.form("a", step=100)
    b = driver.ask("b", 0)
    driver.ask("a", 101)
    assert b.members == "a b"
    driver.die("a")
    retry = driver.ask("b", 0, failures=1)
    driver.wait(400, "b")
    assert retry.members == "b"


def test_the_standing_quorum_outlives_a_restart_of_the_lighthouse() -> None:
    driver = TorchftDriver()
    first = driver.form("a b", step=7)
    driver.start()
    driver.beat("a")
    a, b = driver.ask_all("a b", 8)
    assert a.answer.quorum_id == b.answer.quorum_id == first.id


def test_someone_joins_just_after_a_restart_of_the_lighthouse() -> None:
    driver = TorchftDriver()
    driver.form("a b", step=7)
    driver.start()
    c = driver.ask("c")
    a, _ = driver.ask_all("a b", 8)
    assert a.members == c.members == "a b c"
    assert not any("total loss" in line for line in driver.core.view(driver.now_ms).story)


def test_the_next_run_on_a_restarted_lighthouse_waits_no_longer_than_members_may_need_to_come_back() -> None:
    driver = TorchftDriver(min_replicas=2)
    driver.form("a b", step=7)
    driver.start()
    c, d = driver.ask_all("c d", 0)
    assert c.open, "a and b may live"
    driver.wait(3_500, "c d")
    assert c.members == d.members == "c d"


def test_a_cut_of_the_lighthouse_from_all_members_loses_nobody() -> None:
    """Rule L6: who hears nobody doubts itself."""
    driver = TorchftDriver()
    first = driver.form("a b c")
    driver.wait(9_000)
    driver.wait(2_000, "a b c")
    assert driver.ask_all("a b c", 1)[0].answer.quorum_id == first.id


def test_who_waits_to_join_and_is_not_heard_either_is_no_sign_that_the_lighthouse_hears() -> None:
    driver = TorchftDriver()
    driver.form("a b", step=7)
    driver.wait(1_000, "a b")
    c = driver.ask("c", 0)
    driver.wait(9_000)
    assert c.open
    driver.wait(2_000, "a b c")
    c = driver.ask("c", 0)
    assert driver.ask("a", 8).open
    assert driver.ask("b", 8).members == c.members == "a b c"
    assert c.steps == [8, 8, 0]


def test_a_newcomer_takes_over_from_a_silent_only_member_after_the_heartbeat_limit() -> None:
    """Its word is from outside: the Lighthouse is not cut off. The silent one heals, or is healed from, when it is back."""
    driver = TorchftDriver()
    first = driver.form("a", step=7)
    driver.wait(4_000)
    b = driver.ask("b", 0)
    driver.wait(900, "b")
    assert b.open, "a may be in a long step"
    driver.wait(1_200, "b")
    assert b.members == "b" and b.answer.quorum_id > first.id
    driver.beat("a")  # it was frozen
    a = driver.ask("a", 7)
    assert driver.ask("b", 1).members == a.members == "a b"
    assert a.steps == [7, 1], "b heals from a"


def test_a_newcomer_takes_over_from_members_whose_connections_broke_in_a_long_silence() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    driver.wait(4_500)
    driver.die("a")
    driver.die("b")
    driver.wait(RETURN_GRACE_MS + 200)
    c = driver.ask("c", 0)
    driver.wait(300, "c")
    assert c.members == "c"


def test_ids_grow_after_a_lost_store() -> None:
    """torchft's own Lighthouse begins at 1 again, and replicas that met that id before keep their old process group."""
    driver = TorchftDriver()
    first = driver.form("a b")
    driver.wait(1_000, "a b")
    driver.start(lost_store=True)
    driver.beat("b")
    a, _ = driver.ask_all("a b", 1)
    assert a.answer.quorum_id > first.id


def test_an_operator_ends_a_replica_whose_later_words_are_refused() -> None:
    driver = TorchftDriver()
    driver.form("a b")
    a, b = driver.ask_all("a", 1)[0], driver.ask("b", 1)
    b = driver.ask("b", 2)
    driver.exit_seen("b")
    assert isinstance(b.outcome, Refusal)
    a = driver.ask("a", 2)
    assert a.members == "a"
    driver.beat("b")
    assert isinstance(driver.ask("b", 2).outcome, Refusal)


def test_a_pause_of_the_lighthouse_loses_nobody() -> None:
    driver = TorchftDriver()
    first = driver.form("a b")
    driver.now_ms += 5_500
    driver.resume()
    driver.wait(500)
    assert driver.ask_all("a b", 1)[0].answer.quorum_id == first.id


def test_addresses_that_are_none_do_not_spoil_the_store() -> None:
    driver = TorchftDriver()
    assert driver.ask("a", address="nonsense").answer.participants[0].address == "nonsense"
    assert driver.quorum.members[0].address == "unknown:1"


@pytest.mark.parametrize(("join_ms", "beat_ms"), [(0, 50), (100, 5_000), (60_000, 60_000), (1, 1_000)])
def test_any_settings_of_a_lighthouse_make_settings_of_this_job(join_ms: int, beat_ms: int) -> None:
    config = core_config(
        CoreConfig(join_timeout_ms=join_ms, timeouts=Timeouts(heartbeat_override_ms=beat_ms))
    )
    assert config.timeouts.heartbeat_timeout_ms == beat_ms
    assert config.join_timeout_ms == join_ms


# --- arbitrary schedules ------------------------------------------------------------------------------------------

NAMES = "abcd"
names = st.sampled_from(NAMES)


class Schedule(RuleBasedStateMachine):
    """Replicas that ask, beat, die, come back under a new name, freeze, give up a call; a Lighthouse that restarts.

    The driver checks every answer; ``teardown`` checks that all who live are answered together once the faults end.
    """

    @initialize(min_replicas=st.sampled_from([1, 2]), join_ms=st.sampled_from([500, 10_000]))
    def begin(self, min_replicas: int, join_ms: int) -> None:
        self.driver = TorchftDriver(min_replicas, join_timeout_ms=join_ms)
        self.lives = dict.fromkeys(NAMES, 1)
        self.steps = dict.fromkeys(NAMES, 0)
        self.open: dict[str, Question] = {}

    def name(self, replica: str) -> str:
        return f"{replica}{self.lives[replica]}"

    def take_answers(self) -> None:
        for replica, question in list(self.open.items()):
            if not question.open:
                del self.open[replica]
                if isinstance(question.outcome, Refusal):
                    continue
                newest = max(question.steps, default=0)
                if not question.withdrawn:
                    self.steps[replica] = newest + 1

    @rule(replica=names, failures=st.sampled_from([0, 0, 0, 1]), shrink=st.sampled_from([False, False, True]))
    def ask(self, replica: str, failures: int, shrink: bool) -> None:
        self.take_answers()
        if replica not in self.open:
            self.open[replica] = self.driver.ask(
                self.name(replica), self.steps[replica], failures=failures, shrink=shrink
            )
        self.take_answers()

    @rule()
    def ask_all(self) -> None:
        for replica in NAMES:
            self.ask(replica, 0, False)

    @rule(replica=names)
    def give_up(self, replica: str) -> None:
        if replica in self.open:
            self.driver.withdraw(self.open.pop(replica))

    def shrinking(self) -> list[str]:
        """Who lets nobody new in: until its call is over, too few former members may be left, as with torchft."""
        return [replica for replica, question in self.open.items() if question.participant.shrink_only]

    @rule(replica=names, again=st.booleans())
    def die(self, replica: str, again: bool) -> None:
        self.open.pop(replica, None)
        self.driver.die(self.name(replica))
        self.lives[replica] += 1
        self.steps[replica] = 0
        if again:
            self.driver.beat(self.name(replica))

    @rule(replica=names)
    def blink(self, replica: str) -> None:
        """Its connections break, the process lives."""
        self.open.pop(replica, None)
        self.driver.die(self.name(replica))

    @rule(
        ms=st.sampled_from([1, 200, 400, 3_000, 6_000]),
        beating=st.sampled_from(["", "a", "ab", "bcd", "abcd"]),
    )
    def wait(self, ms: int, beating: str) -> None:
        self.driver.wait(ms, " ".join(map(self.name, beating)))
        self.take_answers()

    @rule(lost_store=st.booleans())
    def restart(self, lost_store: bool) -> None:
        self.driver.now_ms += 2
        self.open.clear()
        self.driver.start(lost_store=lost_store)
        self.driver.answers.clear()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        everybody = " ".join(map(self.name, NAMES))
        for replica in self.shrinking():
            self.give_up(replica)
        for _ in range(12):
            self.ask_all()
            self.driver.wait(700, everybody)
            self.take_answers()
        last = self.driver.answers[-1]
        assert [p.replica_id for p in last.participants] == everybody.split(), self.driver.core.view(0).story[
            -20:
        ]


def test_who_stood_still_and_was_silent_may_take_part_again() -> None:
    """The adapter forgot b, the core did not: its question looked like an old one, and it was kept out for ever."""
    schedule = Schedule()
    schedule.begin(min_replicas=1, join_ms=500)
    schedule.ask("b", 0, False)
    schedule.ask_all()
    schedule.ask_all()
    schedule.wait(6_000, "")
    schedule.die("a", False)
    schedule.die("b", False)
    schedule.ask("a", 0, False)
    schedule.ask_all()
    schedule.ask("a", 0, False)
    schedule.wait(6_000, "")
    schedule.teardown()


def test_too_few_that_let_nobody_new_in_wait_until_their_call_is_over() -> None:
    schedule = Schedule()
    schedule.begin(min_replicas=2, join_ms=500)
    schedule.ask_all()
    schedule.die("a", False)
    schedule.ask("b", 0, True)
    answers = len(schedule.driver.answers)
    schedule.ask_all()
    schedule.wait(6_000, "abcd")
    assert len(schedule.driver.answers) == answers
    schedule.teardown()


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
