"""Which threads become batch threads, where it is refused, and that nothing is tried where it can't be. On ranks:
dist/test_gloo_threads.py."""

import os
from pathlib import Path

import pytest

from megalite.comm import threads

TASKS = {"7": "python\n", "8": "gloo_tcp_loop\n", "9": "pt_gloo_runloop\n", "10": "pt_autograd_0\n"}
pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch) -> list[tuple[int, int]]:
    """Threads in a made up /proc; returns what is asked of the system, (thread, policy)."""
    for task, name in TASKS.items():
        (tmp_path / task).mkdir()
        (tmp_path / task / "comm").write_text(name)
    (tmp_path / "11").mkdir()  # it ended while the folder was read
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(threads, "TASKS", tmp_path)
    monkeypatch.setattr(os, "sched_setscheduler", lambda task, policy, param: made.append((task, policy)))
    return made


def test_gloos_threads_and_no_others(calls):
    assert threads.let_compute_go_on(crowded=False) == 2
    assert sorted(calls) == [(8, os.SCHED_BATCH), (9, os.SCHED_BATCH)]


def test_all_threads_on_a_crowded_host(calls):
    assert threads.let_compute_go_on(crowded=True) == 5
    assert sorted(calls) == [(task, os.SCHED_BATCH) for task in (7, 8, 9, 10, 11)]


def test_a_refused_call_is_no_error(calls, monkeypatch):
    def refuse(task, policy, param):
        calls.append((task, policy))
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert threads.let_compute_go_on(crowded=False) == 0
    assert len(calls) == 2


def test_nothing_is_tried_without_the_policy(calls, monkeypatch):
    monkeypatch.delattr(os, "SCHED_BATCH")
    assert threads.let_compute_go_on(crowded=False) == 0
    assert calls == []


def test_nothing_is_tried_without_proc(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "TASKS", tmp_path / "missing")
    assert threads.let_compute_go_on(crowded=False) == 0
    assert calls == []
