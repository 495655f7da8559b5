"""`ktplan run` and `ktplan eval` as a user types them."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ktplan.cli.main import _run
from ktplan.rules import Rules

Cli = Callable[..., Any]
PROMPT = "The President of the United States"


class Told(NamedTuple):
    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)

    def refused(self, code: int, *words: str) -> None:
        assert self.code == code, self
        for word in words:
            assert word in self.stderr, self


@pytest.fixture
def ktplan(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    """The command line inside this process: torch is loaded once. Two tests run it as a user does, through `cli`."""

    def run(*arguments: str | Path, input: str = "") -> Told:
        monkeypatch.setattr(sys, "stdin", io.StringIO(input))
        capfd.readouterr()
        code = _run([*map(str, arguments)])
        return Told(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def rules_file(tmp_path_factory: pytest.TempPathFactory, hybrid: Callable[[str], Rules]) -> Path:
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    hybrid("0-3,7").save(file)
    return file


def test_run_writes_text_to_stdout_and_figures_to_stderr(
    cli: Cli, tiny: Path, store_of: Callable[..., Path]
) -> None:
    done = cli(
        "run",
        "tiny",
        "--store",
        store_of(tiny),
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "8",
        "--threads",
        "1",
    ).ok()
    assert done.stdout.strip()
    assert "answer 8 tokens" in done.stderr and "GPU served 0.0 %" in done.stderr
    again = cli(
        "run",
        "tiny",
        "--store",
        store_of(tiny),
        "--max-new-tokens",
        "8",
        "--threads",
        "1",
        "-q",
        input=PROMPT,
    ).ok()
    assert again.stdout == done.stdout
    assert again.stderr == ""


def test_run_as_json_with_rules(
    ktplan: Cli, tiny: Path, store_of: Callable[..., Path], rules_file: Path
) -> None:
    asked = ("--prompt", PROMPT, "--max-new-tokens", "8", "--threads", "1", "--json")
    body = ktplan("run", "tiny", "--store", store_of(tiny), "--rules", rules_file, *asked).json()
    assert body["kind"] == "run-report" and body["version"] == 1
    assert body["finish_reason"] == "length" and len(body["tokens"]) == 8
    assert body["gpu_experts"] == {str(layer): "0-3,7" for layer in range(4)}
    assert 0 < body["decode_gpu_hit_rate"] < 1
    assert body["bytes"]["store (mapped)"] > 0
    assert any("stands in for cuda:0" in note for note in body["notes"]) or "cuda:0" in body["bytes"]


def test_chat_reads_turns_from_stdin(ktplan: Cli, tiny: Path, store_of: Callable[..., Path]) -> None:
    asked = ("--store", store_of(tiny), "--chat", "--max-new-tokens", "5", "--threads", "1")
    done = ktplan("run", "tiny", *asked, input="Hello\n/stats\n/quit\n")
    assert done.stdout.strip()
    assert "/help" in done.stderr and "answer 5 tokens" in done.stderr


def test_a_dry_run_needs_no_weights(ktplan: Cli, tiny: Path, tmp_path: Path, rules_file: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    body = ktplan("run", tmp_path, "--rules", rules_file, "--dry-run", "--dtype", "bfloat16", "--json").json()
    assert body["kind"] == "run-dry-run"
    assert body["bytes"]["cuda:0"] == 4 * 5 * 3 * 256 * 128 * 2
    assert body["rules"][0]["layers"] == "0-3"
    assert body["rules"][0]["where"].endswith("rules.yaml, line 1 (rule 1)")


def test_a_budget_is_checked_before_loading(ktplan: Cli, tiny: Path, rules_file: Path) -> None:
    done = ktplan("run", "tiny", "--rules", rules_file, "--dry-run", "--gpu-memory", "1MiB")
    done.refused(3, "cuda:0", "budget", "1.00 MiB")
    assert "0-3" in done.stdout


def test_refusals_come_in_one_line(
    ktplan: Cli, tiny: Path, tmp_path: Path, store_of: Callable[..., Path]
) -> None:
    (tmp_path / "r.yaml").write_text("- match: {nam: a}\n  replace: {}\n")
    ktplan("run", "tiny", "--rules", tmp_path / "r.yaml", "--dry-run").refused(
        4, "r.yaml, line 1", "did you mean 'name'"
    )
    ktplan("run", "tiny", "--prompt", "x", "--chat").refused(2, "exclude each other")
    ktplan("run", "tiny", "--prompt", "x", "--top-p", "2").refused(2, "top-p is 2")
    ktplan("run", "tiny", "--prompt", "x", "--store", tmp_path).refused(4, "store.json")


def test_a_store_of_another_model_is_refused(
    ktplan: Cli, tiny: Path, family_checkpoint: Callable[..., Path], store_of: Callable[..., Path]
) -> None:
    other = family_checkpoint("mixtral")
    ktplan("run", other, "--store", store_of(tiny), "--prompt", "x").refused(4, "was made from")


def test_a_prompt_that_is_too_long_is_refused(ktplan: Cli, tiny: Path) -> None:
    ktplan("run", "tiny", "--prompt", "word " * 1100, "--threads", "1").refused(3, "1,024")


def test_eval_compares_with_the_unquantized_model(
    ktplan: Cli, tiny: Path, tmp_path: Path, store_of: Callable[..., Path], rules_file: Path
) -> None:
    (tmp_path / "text.jsonl").write_text(
        '{"text": "In the beginning of the war"}\n{"text": "def main(argv):\\n    return 0"}\n'
    )
    asked = ("--dataset", tmp_path / "text.jsonl", "--threads", "1")
    two = ("--store", store_of(tiny), "--store", store_of(tiny, 4))
    body = ktplan("eval", "tiny", *two, "--rules", rules_file, *asked, "--json").json()
    assert body["kind"] == "eval-report"
    fine, coarse = body["stores"]
    assert (fine["scheme"], coarse["scheme"]) == ("int8-row", "int4-row")
    assert fine["documents"] == 2 and fine["top1_agreement"] >= 0.9
    assert 0 <= fine["kl"] < coarse["kl"] < 0.1
    assert fine["experts_bytes"] > coarse["experts_bytes"]
    low, high = fine["intervals"]["perplexity"]
    assert low < fine["perplexity"] < high
    assert 0 < fine["gpu_hit_rate"] == coarse["gpu_hit_rate"] < 1
    assert body["reference"]["perplexity"] == pytest.approx(fine["perplexity"], rel=0.02)
    assert body["reference"]["tokens_per_s"] > 0 and body["reference"]["kl"] is None
    alone = ktplan("eval", "tiny", *asked, "--no-reference")
    assert "unquantized" in alone.stdout and "perplexity" in alone.stdout


def test_gpu_experts_come_from_gptq_weights(
    ktplan: Cli, tiny: Path, tmp_path: Path, store_of: Callable[..., Path], rules_file: Path
) -> None:
    """The experts that the rules put on the GPU are those of the GPTQ folder; one that it lacks is refused."""
    from ktplan.convert.gpu import GpuOptions, convert_gpu
    from ktplan.experts import ExpertSet
    from ktplan.model import open_source

    some = ExpertSet.from_ranges({str(layer): "0-3,7" for layer in range(4)})
    convert_gpu(open_source(tiny), tmp_path / "w8", GpuOptions(bits=8, method="rtn"), experts=some)
    asked = ("eval", "tiny", "--store", store_of(tiny), "--gpu-weights", tmp_path / "w8", "--threads", "1")
    (tmp_path / "text.txt").write_text("In the beginning of the war, the President of the United States")
    body = ktplan(*asked, "--rules", rules_file, "--dataset", tmp_path / "text.txt", "--json").json()
    assert body["gpu_weights"] == str(tmp_path / "w8")
    assert 0 < body["stores"][0]["kl"] < 0.01
    rules_file.with_name("more.yaml").write_text(rules_file.read_text().replace("0-3,7", "0-4,7"))
    more = rules_file.with_name("more.yaml")
    refused = ktplan(*asked, "--rules", more, "--dataset", tmp_path / "text.txt")
    refused.refused(4, str(tmp_path / "w8"), "the first is expert 4 of layer 0", "convert-gpu")
    # Without a plan and rules, what the folder holds goes to the GPU: it is never left aside in silence.
    told = ktplan("run", "tiny", "--gpu-weights", tmp_path / "w8", "--dry-run", "--json").json()
    assert told["gpu_experts"] == {str(layer): "0-3,7" for layer in range(4)}
    assert "the 20 experts of" in told["notes"][0]


def test_a_plan_is_run(ktplan: Cli, tiny: Path, tmp_path: Path, store_of: Callable[..., Path]) -> None:
    plan = tmp_path / "plan.json"
    ktplan("place", "tiny", "--strategy", "uniform", "--gpu-experts", "4", "-o", plan)
    asked = (
        "--store",
        store_of(tiny),
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "4",
        "--threads",
        "1",
        "--json",
    )
    body = ktplan("run", "tiny", "--plan", plan, *asked).json()
    assert body["gpu_experts"] == {str(layer): "0-3" for layer in range(4)}
    ktplan("emit", plan, "-o", tmp_path / "rules.yaml")
    emitted = ktplan("run", "tiny", "--rules", tmp_path / "rules.yaml", *asked).json()
    assert (emitted["gpu_experts"], emitted["text"]) == (body["gpu_experts"], body["text"])


def test_a_plan_of_another_model_is_refused(
    ktplan: Cli, tiny: Path, tmp_path: Path, family_checkpoint: Callable[..., Path]
) -> None:
    plan = tmp_path / "plan.json"
    ktplan("place", "tiny", "--strategy", "uniform", "--gpu-experts", "4", "-o", plan)
    ktplan("run", family_checkpoint("olmoe"), "--plan", plan, "--prompt", "x").refused(4, "another model")


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """The embedded model, to be damaged."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    return folder


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"eos_token_id": "end"}', "eos_token_id is 'end'"),
        ("version https://git-lfs.github.com/spec/v1\n", "generation_config.json is"),
    ],
)
def test_a_damaged_generation_config_is_named(ktplan: Cli, model: Path, text: str, word: str) -> None:
    (model / "generation_config.json").write_text(text)
    ktplan("run", model, "--prompt", "x", "--threads", "1").refused(
        4, "generation_config.json", word, "hint:"
    )


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ 1 + 'a' }}", "{{ a.b.c }}"])
def test_a_template_that_stumbles_is_named(ktplan: Cli, model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    done = ktplan("run", model, "--chat", "--threads", "1", input="Hello\n")
    done.refused(4, "chat template refuses the conversation")


def test_a_model_without_tokenizer_is_refused_before_its_weights_are_loaded(ktplan: Cli, model: Path) -> None:
    for file in model.glob("*token*"):
        file.unlink()
    done = ktplan("run", model, "--prompt", "x", "--threads", "1")
    done.refused(4, "has no tokenizer", "tokenizer.json")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.experts.3.up_proj.weight"])
def test_a_weight_that_is_no_number_is_named_and_not_computed_with(
    ktplan: Cli, model: Path, name: str
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors[name][2, 5] = float("nan")
    save_file(tensors, model / "model.safetensors")
    for arguments in (("run", model, "--prompt", "x"), ("eval", model, "--dataset", "corpus:test")):
        done = ktplan(*arguments, "--threads", "1")
        done.refused(4, str(model), "1 values that are NaN or infinite", "nan at [")
        assert done.stdout == ""


def test_stdin_in_another_encoding_is_refused(cli: Cli, tiny: Path) -> None:
    work = [sys.executable, "-m", "ktplan", "run", "tiny", "--chat", "--threads", "1"]
    done = subprocess.run(work, input=b"\xff\xfe\n", capture_output=True)
    assert done.returncode == 2 and b"error: stdin is not UTF-8 text" in done.stderr


def test_a_model_may_be_named_by_its_file(ktplan: Cli, tiny: Path) -> None:
    asked = ("--prompt", PROMPT, "--max-new-tokens", "4", "--threads", "1")
    by_folder, by_file = (ktplan("run", path, *asked) for path in (tiny, tiny / "model.safetensors"))
    assert by_file.code == 0 and by_file.stdout == by_folder.stdout
