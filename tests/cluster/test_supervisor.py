"""Members are kept alive: whatever dies or is stopped is ended for certain, replaced under its name, and told to everybody."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import member_parts
import pytest
import ray
from member_parts import BOUND_S, Unloadable, begin, echoes, is_gone, live, pair, plan, replaced, said, wait_for
from ray import cloudpickle
from ray.util.placement_group import placement_group_table

from pipelines.batch.ray_session import ray_session
from ragspec.cluster.groups import Wanted
from ragspec.cluster.keeper import Versions
from ragspec.cluster.keepers import detached
from ragspec.cluster.ledger import NAMESPACE, Entry, Ledger
from ragspec.cluster.processes import Process
from ragspec.cluster.shell import Role, shell_class
from ragspec.cluster.supervised import SupervisedDirectory
from ragspec.cluster.supervisor import start_supervisor
from ragspec.cluster.teardown import actors_of, sweep
from ragspec.errors import ConfigError, EngineError

pytestmark = pytest.mark.ray

cloudpickle.register_pickle_by_value(member_parts)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session("local"):
        yield


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Any]:
    """Two words, two ranks, one spare process."""
    yield begin(plan("many", (*echoes(2), pair("engine-0")), num_spares=1))
    sweep("many")


def spares(name: str = "many") -> dict[str, int]:
    """The pids of the warm ones."""
    entries = Ledger(name).entries().items()
    return {key: entry.places[0].process.pid for key, entry in entries if key.startswith("spare-") and entry.live}


def pids(supervisor: Any, name: str) -> tuple[int, ...]:
    members = ray.get(supervisor.status.remote(), timeout=BOUND_S)
    return next(member.pids for member in members if member.name == name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_member_is_replaced_by_a_warm_process(supervisor: Any, number: int) -> None:
    """A stopped process hears no order of Ray's and stays; a replacement that starts from nothing takes many times as long."""
    live(supervisor, 3)
    warm = wait_for(spares)
    (first, second, _), others = live(supervisor, 3), set(warm.values())
    word, pid = said(first)
    os.kill(pid, number)
    later = replaced(supervisor, first)
    new_word, new_pid = said(later)
    assert new_word == word == "word 0"
    assert new_pid in others
    wait_for(lambda: is_gone(pid), "the end of the old process")
    assert said(second)[0] == "word 1"
    assert later.actor is not None and first.node == later.node


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
def test_ranks_of_a_group_are_restarted_as_one(supervisor: Any, number: int) -> None:
    """A new rank beside old ones waits for messages that were sent before it was there."""
    group = next(member for member in live(supervisor, 3) if member.name == "engine-0")
    before = pids(supervisor, "engine-0")
    os.kill(before[1], number)
    later = replaced(supervisor, group)
    assert said(later)[0] == "engine-0 0 of 2"
    after = pids(supervisor, "engine-0")
    assert len(before) == len(after) == 2 and not set(before) & set(after)
    wait_for(lambda: all(map(is_gone, before)), "the end of all old ranks")


def test_a_report_is_looked_into_before_anything_is_ended(supervisor: Any) -> None:
    """A client that is slow itself, or late with its news, has healthy members killed."""
    member = live(supervisor, 3)[0]
    _, pid = said(member)
    for epoch in (member.epoch - 1, member.epoch):
        ray.get(supervisor.report.remote(member.name, epoch, "it does not answer me"))
        time.sleep(1.0)
        assert said(live(supervisor, 3)[0])[1] == pid


def test_what_is_dead_inside_a_living_process_is_replaced_when_reported(supervisor: Any) -> None:
    """An engine whose group is broken answers every ping, and is never replaced."""
    member = next(member for member in live(supervisor, 3) if member.name == "engine-0")
    before = pids(supervisor, "engine-0")
    ray.get(member.actor.break_down.remote())
    ray.get(supervisor.report.remote(member.name, member.epoch, "its group is broken"))
    replaced(supervisor, member)
    assert not set(before) & set(pids(supervisor, "engine-0"))


def test_the_table_is_told_when_it_changes_and_not_before(supervisor: Any) -> None:
    """Clients ask in a loop, or hear of a death when they ask next."""
    live(supervisor, 3)
    table = ray.get(supervisor.table.remote())
    waiting = supervisor.table.remote(table.version, BOUND_S)
    assert not ray.wait([waiting], timeout=1.0)[0]
    assert ray.get(supervisor.table.remote(table.version, 0.1)).version == table.version
    member = table.members[0]
    os.kill(said(member)[1], signal.SIGKILL)
    told = ray.get(waiting, timeout=BOUND_S)
    assert told.version > table.version
    assert next(m for m in told.members if m.name == member.name).state == "lost"
    replaced(supervisor, member)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_supervisor_that_is_started_again_finds_its_members(supervisor: Any, number: int) -> None:
    """It starts everything anew, or tells clients versions that they have seen."""
    members = live(supervisor, 3)
    before = {member.name: pids(supervisor, member.name) for member in members}
    version = ray.get(supervisor.table.remote()).version
    pid = ray.get(supervisor.ping.remote()).process.pid
    directory = SupervisedDirectory(supervisor)
    seen = [directory.table()]
    time.sleep(2.0)  # its keeper has been told to guard it
    os.kill(pid, number)
    while seen[-1].version == version:
        seen.append(directory.table(version, 0.5))
    assert all([member.state for member in table.members] == ["live"] * 3 for table in seen), "members went missing"
    assert ray.get(supervisor.ping.remote(), timeout=BOUND_S).process.pid != pid
    again = live(supervisor, 3)
    assert [(m.name, m.epoch) for m in again] == [(m.name, m.epoch) for m in members]
    assert {member.name: pids(supervisor, member.name) for member in again} == before
    assert ray.get(supervisor.table.remote()).version > version
    _, dying = said(again[0])
    os.kill(dying, signal.SIGKILL)
    assert said(replaced(supervisor, again[0]))[1] != dying


@pytest.mark.slow
def test_a_dead_keeper_is_replaced(supervisor: Any) -> None:
    """A node without one can do nothing about stopped processes."""
    (name,) = (name for name in Ledger("many").entries() if name.startswith("keeper-"))
    before = Ledger("many").read(name)
    assert before is not None
    os.kill(before.places[0].process.pid, signal.SIGSTOP)
    wait_for(lambda: is_gone(before.places[0].process.pid), "the end of the stopped keeper")
    wait_for(lambda: Ledger("many").read(name) != before, "another keeper")
    members = live(supervisor, 3)
    _, pid = said(members[0])
    os.kill(pid, signal.SIGSTOP)
    replaced(supervisor, members[0])
    wait_for(lambda: is_gone(pid), "the end of the old process")


@pytest.mark.slow
def test_a_member_that_cannot_start_pauses_longer_and_longer_and_says_why(tmp_path: Path) -> None:
    """It takes all processors for its attempts; or nobody learns what is wrong; or it takes the others with it."""
    broken = Wanted("encoder-0", "encoder", Role("encoder", Unloadable, (str(tmp_path / "log"),)), cpus=0.01)
    (tmp_path / "log").touch()
    supervisor = begin(plan("broken", (*echoes(1), broken)))
    try:
        live(supervisor, 1)
        wait_for(lambda: len((tmp_path / "log").read_text()) >= 2, "a second attempt")
        time.sleep(1.5)
        assert len((tmp_path / "log").read_text()) < 6
        status = next(s for s in ray.get(supervisor.status.remote()) if s.name == "encoder-0")
        assert status.error == "no weights in the folder"
        assert status.state != "live"
    finally:
        sweep("broken")


def test_what_a_node_lacks_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Every engine fails by itself, after minutes, with an error of the loader's that names no node."""
    here, missing = tmp_path, tmp_path / "missing"
    supervisor = start_supervisor(plan("lacking", echoes(1), paths=((str(here), "index"), (str(missing), "target"))))
    try:
        with pytest.raises(ConfigError, match=rf"node \S+ \(\w+\) has no target {missing}") as caught:
            ray.get(supervisor.begin.remote(Versions.here()))
        assert str(here) + " " not in str(caught.value)
        with pytest.raises(EngineError):
            ray.get(supervisor.table.remote())
    finally:
        sweep("lacking")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "words"), [({"code": "0" * 12}, "ragspec 0{12} and"), ({"ragspec": "0.0.9"}, "ragspec 0.0.9 and")]
)
def test_other_versions_are_refused_by_name(wrong: dict[str, str], words: str) -> None:
    """Objects of one version are read as those of another, and fail somewhere inside."""
    supervisor = start_supervisor(plan("old", echoes(1)))
    try:
        with pytest.raises(EngineError, match=f"versions differ here and on node .*: {words}"):
            ray.get(supervisor.begin.remote(Versions.here()._replace(**wrong)))
        with pytest.raises(EngineError):
            ray.get(supervisor.table.remote())
    finally:
        sweep("old")


@pytest.mark.slow
def test_nothing_is_left_after_a_sweep_even_of_stopped_processes() -> None:
    """Actors, placement groups or processes of a deployment that is gone."""
    supervisor = begin(plan("swept", (*echoes(1), pair("engine-0")), num_spares=1))
    live(supervisor, 2)
    wait_for(lambda: spares("swept"))
    entries = Ledger("swept").entries()
    processes: set[Process] = {place.process for entry in entries.values() for place in entry.places}
    assert len(processes) >= 6  # supervisor, keeper, spare, three members
    os.kill(entries["shard-0"].places[0].process.pid, signal.SIGSTOP)
    os.kill(entries["supervisor"].places[0].process.pid, signal.SIGSTOP)
    sweep("swept")
    assert not actors_of("swept") and not Ledger("swept").entries()
    assert not [process for process in processes if process.state()]
    groups = [group for group in placement_group_table().values() if "/swept/" in group["name"]]
    assert all(group["state"] == "REMOVED" for group in groups)
    sweep("swept")
    assert actors_of("many"), "it ended another deployment"
    with pytest.raises(ValueError):
        ray.get_actor("swept/supervisor", namespace=NAMESPACE)


@pytest.mark.slow
def test_a_spare_that_was_being_started_is_ended_by_the_next_supervisor() -> None:
    """A record without a process stopped the care for spares until the next deployment, and its process stayed."""
    supervisor = begin(plan("halves", echoes(1), num_spares=1))
    try:
        (member,) = live(supervisor, 1)
        wait_for(lambda: spares("halves"))
        half = shell_class().options(num_cpus=0, **detached("halves/spare-half", member.node)).remote()
        place = ray.get(half.ping.remote(), timeout=BOUND_S)
        for name in ("spare-half", "spare-none"):
            Ledger("halves").write(name, Entry(0, (f"halves/{name}",)))
        before = spares("halves")
        os.kill(ray.get(supervisor.ping.remote()).process.pid, signal.SIGKILL)
        wait_for(lambda: is_gone(place.process.pid), "the end of the half started one")
        wait_for(lambda: not {"spare-half", "spare-none"} & Ledger("halves").entries().keys())
        os.kill(next(iter(before.values())), signal.SIGKILL)
        wait_for(lambda: (now := spares("halves")) and not now.items() & before.items(), "another spare")
    finally:
        sweep("halves")


@pytest.mark.slow
def test_what_an_interrupted_down_has_left_is_not_taken_over() -> None:
    """The supervisor is gone, its members and records are not: the next deployment serves the last one's model."""
    old = begin(plan("again", echoes(1)))
    _, pid = said(live(old, 1)[0])
    ray.kill(old)
    wait_for(lambda: "again/supervisor" not in actors_of("again"), "the end of the supervisor")
    new = begin(plan("again", echoes(1)))
    try:
        assert said(live(new, 1)[0])[1] != pid
        wait_for(lambda: is_gone(pid), "the end of the old member")
        assert len([name for name in actors_of("again") if "shard-0" in name]) == 1
    finally:
        sweep("again")


@pytest.mark.slow
def test_a_stopped_member_ends_though_its_keeper_is_stopped_too() -> None:
    """The order to kill it is lost with the keeper, and the process keeps its memory for ever."""
    supervisor = begin(plan("both", echoes(1)))
    try:
        (member,) = live(supervisor, 1)
        _, pid = said(member)
        (keeper,) = (entry for name, entry in Ledger("both").entries().items() if name.startswith("keeper-"))
        os.kill(keeper.places[0].process.pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGSTOP)
        replaced(supervisor, member)
        wait_for(lambda: is_gone(pid), "the end of the old member")
    finally:
        sweep("both")
