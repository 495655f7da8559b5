"""`ktplan convert-cpu` from end to end: the families, refusals before work, and what an early end leaves behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ktplan.convert.cpu import convert_cpu, plan_cpu
from ktplan.convert.job import JOURNAL_FILE
from ktplan.errors import BadInput, BadUsage, DoesNotFit, Interrupted, KtplanError
from ktplan.model import ExpertWeights, open_source
from ktplan.progress import SILENT
from ktplan.quant import Scheme
from ktplan.store import ExpertStore
from ktplan.store import writer as store_writer
from ktplan.store.manifest import JOB_FILE

FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "olmoe"]
WORST = {8: 0.015, 4: 0.20, 2: 0.60}


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def tensors(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: array.tobytes() for name, array in load_file(file).items()}
    return found


class Source:
    """A real source that does something at one expert."""

    def __init__(
        self, folder: Path, layer: int, expert: int, action: Callable[[ExpertWeights], ExpertWeights]
    ) -> None:
        self._inner, self._at, self._action = open_source(folder), (layer, expert), action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def expert_places(self, layer: int, expert: int) -> None:
        return None  # so that every expert comes through here

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        weights = self._inner.expert(layer, expert)
        return self._action(weights) if (layer, expert) == self._at else weights


def raising(fault: BaseException) -> Callable[[ExpertWeights], ExpertWeights]:
    def action(weights: ExpertWeights) -> ExpertWeights:
        raise fault

    return action


# What a store holds.


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_routed_expert_of_every_family_comes_back(
    family: str, bits: int, family_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(family_checkpoint(family))
    convert_cpu(source, tmp_path / "store", Scheme(bits))
    store = ExpertStore.open(tmp_path / "store")
    store.check_model(source.spec)
    assert store.manifest.layers == source.spec.moe_layers
    for layer in source.spec.moe_layers:
        for expert in range(source.spec.experts):
            for exact, found in zip(source.expert(layer, expert), store.expert(layer, expert), strict=True):
                assert np.linalg.norm(found - exact) <= WORST[bits] * np.linalg.norm(exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_and_per_expert_checkpoints_give_the_same_bytes(
    family: str, family_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    for fused in (False, True):
        convert_cpu(open_source(family_checkpoint(family, fused=fused)), tmp_path / str(fused), Scheme(4))
    assert tensors(tmp_path / "False") == tensors(tmp_path / "True")


def test_searched_scales_beat_kt_kernels_on_a_trained_model(tiny: Path, tmp_path: Path) -> None:
    source = open_source(tiny)
    errors = {}
    for bits in (8, 4):
        for scheme in (Scheme(bits), Scheme(bits, rounding="kt")):
            report = convert_cpu(source, tmp_path / f"{scheme.name}-{scheme.rounding}", scheme)
            errors[bits, scheme.rounding] = report.manifest.mean_error
    assert errors[8, "mse"] < errors[8, "kt"] < 0.015
    assert errors[4, "mse"] < 0.9 * errors[4, "kt"]


def test_gate_and_up_do_not_depend_on_the_split_and_down_gets_better(tiny: Path, tmp_path: Path) -> None:
    source = open_source(tiny)
    one = convert_cpu(source, tmp_path / "one", Scheme(8)).manifest
    convert_cpu(source, tmp_path / "two", Scheme(8), numa_parts=2)
    stores = [ExpertStore.open(tmp_path / name) for name in ("one", "two")]
    whole, split = (store.expert(1, 2) for store in stores)
    assert np.array_equal(whole.gate, split.gate) and np.array_equal(whole.up, split.up)
    assert stores[1].manifest.errors[1]["down"][2] < one.errors[1]["down"][2]


def test_the_same_job_gives_the_same_bytes_whatever_the_threads(tiny: Path, tmp_path: Path) -> None:
    for threads in (1, 3):
        convert_cpu(open_source(tiny), tmp_path / str(threads), Scheme(4), threads=threads)
    assert digests(tmp_path / "1") == digests(tmp_path / "3")


def test_the_folder_holds_the_store_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    convert_cpu(open_source(tiny), tmp_path / "store", Scheme(8))
    shards = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(digests(tmp_path / "store")) == [*shards, "model.safetensors.index.json", "store.json"]


# The command.


def test_the_command_reports_for_people_and_for_programs(cli: Callable[..., Any], tmp_path: Path) -> None:
    text = cli("convert-cpu", "tiny", "-o", tmp_path / "a").ok()
    assert "64 experts of tiny, int4-g32, 1 NUMA part" in text.stdout
    assert "mean 0.08" in text.stdout and "worst 0.0" in text.stdout
    assert "next: ktplan run" in text.stderr
    eight = ("--bits", "8", "--numa-parts", "2", "--json", "-q")
    body = cli("convert-cpu", "tiny", "-o", tmp_path / "b", *eight).ok().json()
    assert (body["kind"], body["version"]) == ("convert-cpu-report", 1)
    assert (body["scheme"], body["rounding"], body["numa_parts"], body["experts"]) == (
        "int8-row",
        "mse",
        2,
        16,
    )
    assert body["bytes_in"] == 4 * 16 * 3 * 256 * 128 * 2
    assert body["bytes_out"] == ExpertStore.open(tmp_path / "b").bytes
    assert 0 < body["mean_error"] < body["worst_errors"][0]["error"] < 0.01


def test_a_dry_run_says_what_it_takes_and_writes_nothing(cli: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "store"
    text = cli("convert-cpu", "tiny", "-o", out, "--dry-run").ok().stdout
    assert (
        "4 MoE layers of 16 experts" in text
        and "reads 12.0 MiB" in text
        and "peak memory" in text
        and "about" in text
    )
    body = cli("convert-cpu", "tiny", "-o", out, "--dry-run", "--json").ok().json()
    assert not out.exists()
    assert body["kind"] == "convert-cpu-plan" and body["estimated_seconds"] > 0
    cli("convert-cpu", "tiny", "-o", out, "-q").ok()
    assert body["bytes_out"] == ExpertStore.open(out).bytes


def test_refusals_have_their_exit_codes_and_leave_nothing(cli: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "store"
    cli("convert-cpu", "tiny", "-o", out, "--bits", "4", "--numa-parts", "2").refused(
        2, "64 each", "may be 1"
    )
    cli("convert-cpu", "tiny", "-o", out, "--bits", "2", "--rounding", "kt").refused(2, "no 2-bit format")
    cli("convert-cpu", "tiny", "-o", out, "--bits", "3").refused(2, "'3' is not one of '8', '4', '2'")
    assert not out.exists()


def test_the_layers_left_out_are_told(
    cli: Callable[..., Any], family_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "mtp"
    folder.mkdir()
    origin = family_checkpoint("qwen3_moe")
    (folder / "config.json").write_bytes((origin / "config.json").read_bytes())
    weights = {name: array.view(np.uint16) for name, array in _raw_tensors(origin).items()}
    _save_bf16(
        weights | {"model.layers.3.eh_proj.weight": np.zeros((8, 8), np.uint16)}, folder / "model.safetensors"
    )
    done = cli("convert-cpu", folder, "-o", tmp_path / "store").ok()
    assert (
        "left out: 1 tensors of layers from 3 on" in done.stderr and "multi-token prediction" in done.stderr
    )
    assert ExpertStore.open(tmp_path / "store").manifest.layers == (0, 2)


def _raw_tensors(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = np.frombuffer(raw[start + begin : start + end], np.uint16).reshape(
                    entry["shape"]
                )
    return found


def _save_bf16(weights: dict[str, np.ndarray], path: Path) -> None:
    header, start = {}, 0
    for name, array in weights.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in weights.values())
    )


# Refused before any work.


def test_an_output_that_is_in_use_is_refused_and_left_alone(tiny: Path, tmp_path: Path) -> None:
    source = open_source(tiny)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep")
    file = tmp_path / "file"
    file.write_text("keep")
    for out, words in (
        (full, "not empty"),
        (file, "is a file"),
        (file / "in", "is a file"),
        (tiny, "not empty"),
    ):
        before = digests(out) if out.is_dir() else None
        for work in (plan_cpu, convert_cpu):
            with pytest.raises(BadUsage, match=words) as found:
                work(source, out, Scheme(8))
            assert str(out if out != file / "in" else file) in found.value.message
        assert before is None or digests(out) == before
    assert file.read_text() == "keep"


def test_an_empty_folder_may_be_used(tiny: Path, tmp_path: Path) -> None:
    convert_cpu(open_source(tiny), tmp_path, Scheme(8))
    assert ExpertStore.open(tmp_path).manifest.experts == 16


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output_is_refused(tiny: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    for out in (locked, locked / "store"):
        with pytest.raises(KtplanError, match="cannot be written"):
            convert_cpu(open_source(tiny), out, Scheme(8))


def test_a_disk_that_is_too_small_is_told_with_the_numbers(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)
    )  # type: ignore[attr-defined]
    with pytest.raises(DoesNotFit, match=r"needs 6\.\d+ MiB on .*, 977 KiB are free"):
        convert_cpu(open_source(tiny), tmp_path / "store", Scheme(8))
    assert not (tmp_path / "store").exists()


# What an early end leaves behind.


def test_a_memory_that_is_too_small_is_told_with_the_numbers(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktplan.convert import cpu

    monkeypatch.setattr(cpu, "available_memory", lambda: 300 << 10)
    with pytest.raises(DoesNotFit, match=r"needs .* of memory with 1 threads, 300 KiB are free"):
        convert_cpu(open_source(tiny), tmp_path / "store", Scheme(8), threads=1)
    assert not (tmp_path / "store").exists()


def test_weights_that_are_not_finite_are_named_and_nothing_stays(tiny: Path, tmp_path: Path) -> None:
    def damage(weights: ExpertWeights) -> ExpertWeights:
        weights.up[17, 33] = np.nan
        weights.up[20, 1] = np.inf
        return weights

    source = Source(tiny, 2, 6, damage)
    with pytest.raises(
        BadInput, match=r"layers\.2\.mlp\.experts\.6\.up_proj.* 2 values .* nan at row 17, column 33"
    ):
        convert_cpu(source, tmp_path / "store", Scheme(8))
    assert not (tmp_path / "store").exists()


def test_a_source_that_cannot_be_read_is_told_as_such(tiny: Path, tmp_path: Path) -> None:
    source = Source(tiny, 1, 3, raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(KtplanError, match=r"layer 1, expert 3 cannot be read: Input/output error") as found:
        convert_cpu(source, tmp_path / "deep" / "store", Scheme(8))
    # A network disk may come back: what is finished stays, and the hint says so.
    assert found.value.hint is not None and "1 of 4 layers are kept in" in found.value.hint
    source = Source(tiny, 0, 3, raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(KtplanError, match=r"layer 0, expert 3 cannot be read"):
        convert_cpu(source, tmp_path / "other" / "store", Scheme(8))
    assert not (tmp_path / "other").exists()


def test_a_disk_that_fills_up_gives_one_line_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "from ktplan.cli.main import main; main(sys.argv[1:])"
    )
    out = tmp_path / "store"
    done = subprocess.run(
        [sys.executable, "-c", code, "convert-cpu", "tiny", "--bits", "8", "-o", str(out)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert done.stderr.startswith(
        f"error: {out}/model-00001-of-00004.safetensors.part cannot be written: File too large"
    )
    assert "needs 1.54 MiB" in done.stderr and "Traceback" not in done.stderr
    assert not out.exists()


def test_ctrl_c_before_the_first_layer_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert_cpu(Source(tiny, 0, 9, raising(KeyboardInterrupt())), tmp_path / "store", Scheme(8))
    assert not (tmp_path / "store").exists()


def test_ctrl_c_later_keeps_whole_layers_and_the_same_command_goes_on(tiny: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "store"
    convert_cpu(open_source(tiny), whole, Scheme(4))
    with pytest.raises(Interrupted, match="after 2 of 4 layers") as found:
        convert_cpu(Source(tiny, 2, 9, raising(KeyboardInterrupt())), out, Scheme(4))
    assert found.value.hint is not None and "same command" in found.value.hint
    left = [f"model-{number:05d}-of-00004.safetensors.part" for number in (1, 2)]
    assert sorted(digests(out)) == [JOB_FILE, JOURNAL_FILE, *left]
    with pytest.raises(BadInput, match="unfinished conversion"):
        ExpertStore.open(out)

    assert plan_cpu(open_source(tiny), out, Scheme(4), measure=False).resumed == 2
    with pytest.raises(Interrupted, match="after 3 of 4 layers"):
        convert_cpu(Source(tiny, 3, 0, raising(KeyboardInterrupt())), out, Scheme(4))
    report = convert_cpu(open_source(tiny), out, Scheme(4))
    assert report.resumed == 3
    assert digests(out) == digests(whole)


def test_going_on_never_trusts_a_shard_that_changed(tiny: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "store"
    convert_cpu(open_source(tiny), whole, Scheme(8))
    with pytest.raises(Interrupted):
        convert_cpu(Source(tiny, 3, 0, raising(KeyboardInterrupt())), out, Scheme(8))
    first, second = (out / f"model-{number:05d}-of-00004.safetensors.part" for number in (1, 2))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    second.unlink()
    assert convert_cpu(open_source(tiny), out, Scheme(8)).resumed == 1
    assert digests(out) == digests(whole)


def test_another_job_may_not_go_on_there(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    with pytest.raises(Interrupted):
        convert_cpu(Source(tiny, 1, 0, raising(KeyboardInterrupt())), out, Scheme(8))
    before = digests(out)
    with pytest.raises(
        BadUsage,
        match=r"other arguments: --bits was 'int8-row', is 'int4-row' now",
    ):
        convert_cpu(open_source(tiny), out, Scheme(4))
    with pytest.raises(BadUsage, match=r"--numa-parts was 1, is 2 now"):
        plan_cpu(open_source(tiny), out, Scheme(8), 2)
    assert digests(out) == before


@pytest.mark.parametrize("moment", ["publish", "index", "manifest"])
@pytest.mark.parametrize(
    "scheme", [Scheme(4, 32), Scheme(16, rounding="nearest")], ids=lambda scheme: scheme.name
)
def test_a_crash_in_the_last_moments_is_made_good(
    scheme: Scheme, moment: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL runs no cleaning up: simulated in a child that dies at that moment."""
    whole, out = tmp_path / "whole", tmp_path / "store"
    convert_cpu(open_source(tiny), whole, scheme)
    patch = {
        "publish": "import ktplan.convert.cpu as c; c.write_index = lambda *a: os.kill(os.getpid(), 9)",
        "index": "import ktplan.store.manifest as m; m.write_json = lambda *a: os.kill(os.getpid(), 9)",
        "manifest": "import ktplan.convert.job as j; j.Journal.close = lambda self: os.kill(os.getpid(), 9)",
    }[moment]
    options = ["--dtype", "bf16"] if scheme.bits == 16 else []
    code = f"import os, sys\n{patch}\nfrom ktplan.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "convert-cpu", "tiny", "-q", "-o", str(out), *options], timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    if moment != "manifest":
        with pytest.raises(BadInput, match="unfinished"):
            ExpertStore.open(out)
    (out / ".store.json.123.part").write_text("half")
    assert convert_cpu(open_source(tiny), out, scheme).resumed == 4
    assert digests(out) == digests(whole)


def test_an_error_while_going_on_keeps_what_was_there(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    with pytest.raises(Interrupted):
        convert_cpu(Source(tiny, 2, 0, raising(KeyboardInterrupt())), out, Scheme(8))
    before = digests(out)
    with pytest.raises(KtplanError):
        convert_cpu(Source(tiny, 3, 5, raising(OSError(errno.EIO, "bad disk"))), out, Scheme(8))
    after = digests(out)
    assert before.items() - {(JOURNAL_FILE, before[JOURNAL_FILE])} <= after.items()
    assert set(after) - set(before) == {"model-00003-of-00004.safetensors.part"}  # finished meanwhile


def test_two_conversions_cannot_write_to_one_folder(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"

    def second(weights: ExpertWeights) -> ExpertWeights:
        with pytest.raises(BadUsage, match="another ktplan is writing"):
            convert_cpu(open_source(tiny), out, Scheme(8))
        return weights

    convert_cpu(Source(tiny, 1, 1, second), out, Scheme(8))
    assert ExpertStore.open(out).manifest.experts == 16


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_command_with_130_and_one_line(name: str, tmp_path: Path, tiny: Path) -> None:
    out = tmp_path / "store"
    # The child interrupts itself, as the terminal would, when layer 2 begins.
    code = (
        "import os, signal, sys, ktplan.convert.cpu as c\n"
        "real = c.Reader.read\n"
        "def read(self, slot, layer, number):\n"
        f"    if (layer, number) == (2, 3): os.kill(os.getpid(), signal.{name})\n"
        "    return real(self, slot, layer, number)\n"
        "c.Reader.read = read\n"
        "from ktplan.cli.main import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert-cpu", "tiny", "--bits", "8", "-o", str(out)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[0] == f"error: stopped after 2 of 4 layers; they are kept in {out}"
    assert "Traceback" not in done.stderr


def test_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    peak = {}
    for layers in (1, 8):
        folder = tmp_path / f"model-{layers}"
        folder.mkdir()
        config = {
            "model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": 8, "num_experts_per_tok": 2,
            "hidden_size": 512, "moe_intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 8,
            "max_position_embeddings": 64,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        matrix = random.standard_normal((512, 512), np.float32)
        names = [
            f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
            for layer in range(layers)
            for expert in range(8)
            for name in ("gate", "up", "down")
        ]
        save_file({name: matrix + number for number, name in enumerate(names)}, folder / "model.safetensors")
        # VmHWM counts from this program's start; ru_maxrss would include what the parent had when it forked.
        code = (
            "import sys; from ktplan.cli.main import _run; code = _run(sys.argv[1:]);"
            "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); sys.exit(code)"
        )
        arguments = ["convert-cpu", str(folder), "-o", str(tmp_path / f"store-{layers}"), "-q", "--json"]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=60
        )
        peak[layers] = int(done.stdout.splitlines()[-1]) * 1024
    assert peak[8] - peak[1] < 24 * 2**20  # the experts grew by 168 MiB
    threads = len(os.sched_getaffinity(0))
    assert peak[8] <= 2**30 + 3 * (3 * 512 * 512 * 4) * threads


def test_a_write_error_of_another_kind_names_the_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_writer.os, "fsync", fail)
    with pytest.raises(KtplanError, match=r"cannot be written: Input/output error"):
        convert_cpu(open_source(tiny), tmp_path / "store", Scheme(8), progress=SILENT)
    assert not (tmp_path / "store").exists()
