"""A conversion that dies at any moment leaves nothing that looks complete, and goes on to the same bytes.

The moments are system calls: a child process dies at, before or in the middle of its n-th write, fsync, rename and so
on. The files of the job are what a user sees, so they are read here as a user would: by ktplan's own reader.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ktplan.convert.cpu import convert_cpu
from ktplan.convert.job import JOURNAL_FILE, Arguments
from ktplan.errors import BadInput, BadUsage, KtplanError
from ktplan.model import open_source
from ktplan.quant import Scheme
from ktplan.store import ExpertStore
from ktplan.store.manifest import JOB_FILE

CALLS = (
    "open",
    "write",
    "fsync",
    "fdatasync",
    "replace",
    "truncate",
    "ftruncate",
    "unlink",
    "mkdir",
    "close",
)
REAL_WRITE = os.write
LAYERS, EXPERTS = 3, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of three layers whose experts lie in two files."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 8,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    values = np.random.default_rng(5)
    places: dict[str, str] = {}
    for layer in range(LAYERS):
        file = f"part-{layer % 2}-{layer}.safetensors"
        names = [
            f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
            for expert in range(EXPERTS)
            for name in ("gate", "up", "down")
        ]
        save_file({name: values.standard_normal((128, 128), np.float32) for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "store"
    convert(model, out)
    return digests(out)


def convert(model: Path, out: Path) -> Any:
    return convert_cpu(
        open_source(model), out, Scheme(4, 32), threads=2, arguments=Arguments(model_path=str(model))
    )


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


class Calls:
    """Counts the system calls of this process that change files (or those of one kind); does something at the n-th."""

    def __init__(
        self, at: int, action: Callable[[str, tuple[Any, ...]], None], only: str | None = None
    ) -> None:
        self._at, self._action, self._only = at, action, only
        self.count = 0
        self.real = {name: getattr(os, name) for name in CALLS}

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrapped(name))

    def remove(self) -> None:
        for name, real in self.real.items():
            setattr(os, name, real)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.count += self._only in (None, name)
            if self.count == self._at and self._only in (None, name):
                self._action(name, arguments)
            return self.real[name](*arguments, **named)

        return call


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a copy of this process; its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def looks_finished_only_if_it_is(out: Path, whole: dict[str, str]) -> None:
    if not out.is_dir():
        return
    try:
        store = ExpertStore.open(out)
    except BadInput:
        # kt-kernel would take any *.safetensors for weights: they appear only when all of them are whole.
        for file in out.glob("*.safetensors"):
            assert digests(out)[file.name] == whole[file.name]
        return
    store.verify()
    assert {name: digest for name, digest in digests(out).items() if name in whole} == whole


def count_calls(model: Path, tmp_path: Path) -> int:
    calls = Calls(-1, lambda name, arguments: None)
    calls.install()
    try:
        convert(model, tmp_path / "counted")
    finally:
        calls.remove()
    return calls.count


def test_killed_at_any_of_its_system_calls_it_goes_on_to_the_same_bytes(
    model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    total = count_calls(model, tmp_path)
    points = random.Random(1)
    moments = sorted(points.sample(range(1, total + 1), min(total, 60)))
    assert len(moments) >= 50

    for moment in moments:
        out = tmp_path / f"killed-{moment}"
        halfway = points.random() < 0.5

        def die(name: str, arguments: tuple[Any, ...], halfway: bool = halfway) -> None:
            if name == "write" and halfway:
                REAL_WRITE(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        calls = Calls(moment, die)

        def run(calls: Calls = calls, out: Path = out) -> None:
            calls.install()
            convert(model, out)

        status = in_child(run)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, moment
        looks_finished_only_if_it_is(out, whole)
        if out.is_dir() and not (out / JOB_FILE).is_file():
            for (
                stray
            ) in out.iterdir():  # died before job.json or after the end: a user would remove or use it
                assert stray.name.startswith(".job.json") or (out / "store.json").is_file()
            if not (out / "store.json").is_file():
                for stray in out.iterdir():
                    stray.unlink()
        if not (out / "store.json").is_file() or (out / JOB_FILE).is_file():
            convert(model, out)
        assert digests(out) == whole, moment


def test_killed_again_and_again_by_the_clock_it_still_gets_there(
    model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "store"
    wait = random.Random(2)
    for _ in range(12):
        child = os.fork()
        if child == 0:
            try:
                convert(model, out)
            finally:
                os._exit(0)
        time.sleep(wait.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        looks_finished_only_if_it_is(out, whole)
        if (out / "store.json").is_file() and not (out / JOB_FILE).is_file():
            break
        if out.is_dir() and not (out / JOB_FILE).is_file():
            for stray in out.iterdir():
                stray.unlink()
    else:
        convert(model, out)
    assert digests(out) == whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_disk_that_fails_gives_an_error_in_words_and_the_same_command_goes_on(
    failing: str, number: int, model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    for moment in _moments_of(failing, model, tmp_path):
        out = tmp_path / f"{failing}-{moment}"

        def fail(name: str, arguments: tuple[Any, ...]) -> None:
            raise OSError(number, os.strerror(number))

        calls = Calls(moment, fail, only=failing)
        calls.install()
        try:
            with pytest.raises(KtplanError) as found:
                convert(model, out)
        finally:
            calls.remove()
        assert str(out) in found.value.message
        looks_finished_only_if_it_is(out, whole)
        assert not (out / "store.json").is_file() or (out / JOB_FILE).is_file()
        convert(model, out)
        assert digests(out) == whole


def _moments_of(failing: str, model: Path, tmp_path: Path) -> list[int]:
    """Some of the calls of that kind: the first, the last that matters, and a few between."""
    calls = Calls(-1, lambda name, arguments: None, only=failing)
    calls.install()
    try:
        convert(model, tmp_path / f"counted-{failing}")
    finally:
        calls.remove()
    # The very last fsync only makes the removal of job.json durable: the store is complete by then.
    last = calls.count - (failing == "fsync")
    return sorted({1, last, *range(2, last, max(1, last // 4))})


def stopped(model: Path, out: Path, layers: int) -> None:
    """A conversion that was killed when so many layers were recorded."""

    def run() -> None:
        from ktplan.convert.job import Journal

        real = Journal.record

        def record(self: Journal, layer: int, done: Any) -> None:
            real(self, layer, done)
            if len(self.finished) == layers:
                os.kill(os.getpid(), signal.SIGKILL)

        Journal.record = record  # type: ignore[method-assign]
        convert(model, out)

    assert os.WIFSIGNALED(in_child(run))


def test_resume_needs_nothing_but_the_folder(
    cli: Callable[..., Any], model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "store"
    cli("convert-cpu", "--resume", out).refused(4, "no conversion that was stopped")
    code = cli("convert-cpu", model, "-o", tmp_path / "other", "--bits", "4", "-q").ok()
    assert digests(tmp_path / "other") == whole and code.code == 0
    stopped_by_command(model, out)
    body = cli("convert-cpu", "--resume", out, "--json", "-q").ok().json()
    assert body["resumed_layers"] == 1
    assert digests(out) == whole
    cli("convert-cpu", "--resume", out).refused(4, "a finished store")


def stopped_by_command(model: Path, out: Path) -> None:
    def run() -> None:
        from ktplan.cli.main import main
        from ktplan.convert.job import Journal

        real = Journal.record

        def record(self: Journal, layer: int, done: Any) -> None:
            real(self, layer, done)
            os.kill(os.getpid(), signal.SIGKILL)

        Journal.record = record  # type: ignore[method-assign]
        main(["convert-cpu", str(model), "-o", str(out), "--bits", "4", "-q"])

    assert os.WIFSIGNALED(in_child(run))


def test_resuming_with_other_arguments_is_refused_by_their_names(
    cli: Callable[..., Any], model: Path, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "store"
    stopped_by_command(model, out)
    before = digests(out)
    cli("convert-cpu", "--resume", out, "--bits", "8").refused(2, "--bits was 'int4-g32', is 'int8-row' now")
    cli("convert-cpu", "--resume", out, "--group-size", "64").refused(
        2, "--group-size was 'int4-g32', is 'int4-g64' now"
    )
    cli("convert-cpu", "--resume", out, "--dtype", "bf16").refused(2, "--bits 4 has nothing to decide")
    cli("convert-cpu", "--resume", out, "--rounding", "kt").refused(2, "--rounding was 'mse', is 'kt' now")
    cli("convert-cpu", tiny, "--resume", out).refused(2, "MODEL was")
    cli("convert-cpu", "--resume", out, "-o", tmp_path / "x").refused(2, "-o", "leave out -o")
    assert digests(out) == before
    cli("convert-cpu", "--resume", out, "--threads", "1", "-q").ok()  # spoils nothing


def test_a_model_that_changed_meanwhile_is_noticed(
    model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    import shutil

    copy, out = tmp_path / "model", tmp_path / "store"
    shutil.copytree(model, copy)
    stopped(copy, out, 2)
    other = next(copy.glob("part-0-0.safetensors"))
    data = bytearray(other.read_bytes())
    data[-3] ^= 1  # a weight of layer 0, which is finished
    other.write_bytes(data)
    report = convert(copy, out)
    assert (
        report.redone == {0: "the model's file part-0-0.safetensors was changed since"}
        and report.resumed == 1
    )
    fresh = tmp_path / "fresh"
    convert(copy, fresh)
    assert digests(out) == digests(fresh)

    config = json.loads((copy / "config.json").read_text())
    stopped(copy, tmp_path / "again", 1)
    (copy / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    with pytest.raises(BadUsage, match="MODEL was"):
        convert(copy, tmp_path / "again")


def test_a_model_that_changes_while_it_is_read_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from ktplan.convert import cpu

    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    real = cpu.Reader.read

    def read(self: Any, slot: Any, layer: int, expert: int) -> Any:
        if (layer, expert) == (1, 2):
            file = copy / "part-1-1.safetensors"
            os.utime(file, ns=(0, file.stat().st_mtime_ns + 1000))
        return real(self, slot, layer, expert)

    monkeypatch.setattr(cpu.Reader, "read", read)
    with pytest.raises(BadInput, match=r"part-1-1\.safetensors was changed while layer 1 was converted"):
        convert(copy, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_shards_and_journal_that_changed_meanwhile_are_noticed(
    model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "store"
    stopped(model, out, 2)
    first = out / "model-00001-of-00003.safetensors.part"
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    report = convert(model, out)
    assert report.redone == {0: "model-00001-of-00003.safetensors.part was changed since"}
    assert digests(out) == whole

    for damage in (
        lambda text: text[:-40],  # the last line was cut off
        lambda text: text.replace(b'"errors": {"down": [0.', b'"errors": {"down": [0.9', 1),
        lambda text: b"\x00\xff\n" + text,
        lambda text: b"",
    ):
        again = tmp_path / f"again-{len(list(tmp_path.iterdir()))}"
        stopped(model, again, 2)
        journal = again / JOURNAL_FILE
        journal.write_bytes(damage(journal.read_bytes()))
        convert(model, again)
        assert digests(again) == whole


def test_the_journal_only_ever_grows(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    stopped(model, out, 1)
    first = (out / JOURNAL_FILE).read_bytes()
    stopped(model, out, 2)
    second = (out / JOURNAL_FILE).read_bytes()
    assert second.startswith(first) and len(second.splitlines()) == 2
    line = json.loads(second.splitlines()[1])
    assert line["body"]["file"]["sha256"].startswith("sha256:") and line["layer"] == 1


def test_few_open_files_are_enough(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    def run() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        convert(model, tmp_path / "store")

    assert in_child(run) == 0
    assert digests(tmp_path / "store") == whole
