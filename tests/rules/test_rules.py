"""Rule files: KTransformers' grammar, read strictly, written so that it reads back equal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ktplan import rules
from ktplan.errors import BadInput
from ktplan.rules import DEFAULT, HYBRID, KT_EXPERTS, Match, Replace, Rule, Rules

CANONICAL = """\
- match:
    name: "^model\\\\.layers\\\\.(0|[1-9])\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      prefill_device: "cuda"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda"
      backend: "AMXInt8"
  recursive: False
- match:
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda:1"
- match:
    name: "^model.embed_tokens"
  replace:
    class: "default"
    kwargs:
      generate_device: "cpu"
      prefill_device: "cpu"
"""


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        rules.parse(text, "r.yaml")
    return f"{caught.value.message} | {caught.value.hint}"


def test_ktransformers_own_form_is_understood() -> None:
    read = rules.parse(CANONICAL)
    assert len(read) == 3
    first, second, third = read
    assert first.match == Match(name=r"^model\.layers\.(0|[1-9])\.mlp\.experts$")
    assert first.replace.class_name == KT_EXPERTS
    assert first.replace.kwargs["backend"] == "AMXInt8"
    assert not first.recursive
    assert second.match == Match(class_name="torch.nn.Linear")
    assert second.recursive and not second.optional
    assert third.replace == Replace(
        class_name=DEFAULT, kwargs={"generate_device": "cpu", "prefill_device": "cpu"}
    )
    assert [rule.line for rule in read] == [1, 13, 19]


def test_a_replacement_without_class_is_default() -> None:
    read = rules.parse("- match: {name: a}\n  replace: {kwargs: {generate_device: cpu}}\n")
    assert read.rules[0].replace.class_name == DEFAULT


def test_written_rules_are_readable_and_read_back_equal() -> None:
    made = Rules(
        (
            Rule(
                match=Match(name=r"^model\.layers\.3\.mlp\.experts$"),
                replace=Replace(class_name=HYBRID, kwargs={"gpu_device": "gpu", "gpu_experts": "0-3,17"}),
                recursive=False,
            ),
            Rule(
                match=Match(name="^.*$", class_name="torch.nn.Linear"),
                replace=Replace(kwargs={"generate_device": "cuda:0"}),
                optional=True,
            ),
        )
    )
    assert made.dump("plan of tiny\n\nfrequency") == (
        "# plan of tiny\n"
        "#\n"
        "# frequency\n"
        "- match:\n"
        "    name: ^model\\.layers\\.3\\.mlp\\.experts$\n"
        "  replace:\n"
        "    class: ktplan.runtime.moe.HybridExperts\n"
        "    kwargs:\n"
        "      gpu_device: gpu\n"
        "      gpu_experts: 0-3,17\n"
        "  recursive: false\n"
        "\n"
        "- match:\n"
        "    name: ^.*$\n"
        "    class: torch.nn.Linear\n"
        "  replace:\n"
        "    class: default\n"
        "    kwargs:\n"
        "      generate_device: cuda:0\n"
        "  optional: true\n"
    )
    assert rules.parse(made.dump("heading")) == made


def test_a_file_remembers_where_its_rules_are(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    rules.parse(CANONICAL).save(file)
    read = rules.load(file)
    assert read == rules.parse(CANONICAL)
    assert read.where(0) == f"{file}, line 1 (rule 1)"
    assert Rules((Rule(match=Match(name="a"), replace=Replace()),), "a plan").where(0) == "a plan, rule 1"


names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30)
patterns = names.map(
    lambda text: "^" + "".join("\\" + c if c in r".^$*+?{}[]()|\\" else c for c in text) + "$"
)
experts = st.sets(st.integers(0, 300), max_size=8).map(sorted)


@given(
    st.lists(
        st.tuples(patterns, experts, st.booleans(), st.booleans(), st.sampled_from(["gpu", "cpu", "cuda:3"])),
        max_size=4,
    )
)
def test_any_rules_survive_the_file(entries: list[tuple[str, list[int], bool, bool, str]]) -> None:
    made = Rules(
        tuple(
            Rule(
                match=Match(name=pattern),
                replace=Replace(class_name=HYBRID, kwargs={"gpu_device": device, "gpu_experts": ids}),
                recursive=recursive,
                optional=optional,
            )
            for pattern, ids, recursive, optional, device in entries
        )
    )
    assert rules.parse(made.dump()) == made
    assert len(yaml.safe_load(made.dump()) or []) == len(made)


ONE = CANONICAL.partition("- match:\n    class")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ONE + " " + ONE, ["line 13", "not valid YAML", "same column"]),
        (
            '- match:\n    name: "^a$"\n  replace:\n    class: default\n  kwargs:\n    generate_device: cpu\n',
            ["line 5", "'kwargs' is not a key of a rule", "inside replace"],
        ),
        (
            ONE.replace("generate_device", "genrate_device"),
            ["line 8", "'genrate_device'", "did you mean 'generate_device'"],
        ),
        ("- match: {name: a}\n  replace:\n    class: default\n    kwargs:\n", ["line 4", "is empty", "indent"]),
        ("- match: {name: a}\n  replace: {class: default}\n", ["line 2", "says no device"]),
        ("- match:\n  replace: {class: default}\n", ["line 1", "match is empty"]),
        ("- match: {}\n  replace: {}\n", ["line 1", "match says nothing"]),
        ("- replace: {class: default}\n", ["line 1", "no 'match'"]),
        ("- match: {name: a}\n", ["line 1", "no 'replace'"]),
        ("- match: {name: a, nam: b}\n  replace: {}\n", ["line 1", "'nam'", "did you mean 'name'"]),
        ("- match: {name: a, name: b}\n  replace: {}\n", ["line 1", "'name' is given twice"]),
        ("- match: {name: '['}\n  replace: {}\n", ["line 1", "no regular expression"]),
        ("- match: {name: 5}\n  replace: {}\n", ["line 1", "name is '5'"]),
        ("- match: {class: 'a b'}\n  replace: {}\n", ["line 1", "not the name of a class"]),
        ("- match: {name: a}\n  replace: {class: os.system}\n", ["line 2", "os.system is not known", HYBRID]),
        ("- match: {name: a}\n  replace: {class: default, kwargs: {generate_device: tpu}}\n", ["'tpu'", "cuda:0"]),
        (f"- match: {{name: a}}\n  replace: {{class: {HYBRID}, kwargs: {{gpu_experts: 3-1}}}}\n", ["'3-1'"]),
        (f"- match: {{name: a}}\n  replace: {{class: {HYBRID}, kwargs: {{gpu_experts: 1.5}}}}\n", ["1.5"]),
        (
            "- match: {name: a}\n  replace: {kwargs: {generate_device: cpu}}\n  recursive: maybe\n",
            ["line 3", "true or false"],
        ),
        ("- 7\n", ["line 1", "a rule is '7'"]),
        ("a: 1\n", ["line 1", "a list of rules was expected"]),
        ("", ["a list of rules was expected"]),
        ("\t- match", ["line 1", "not valid YAML"]),
        (
            "- match: {name: a}\n  replace: {kwargs: {generate_device: !!python/name:os.system x}}\n",
            ["line 2", "not valid YAML"],
        ),
        ("[" * 10_000, ["not valid YAML"]),
        ("- &a [*a]\n", ["line 1"]),
        ("- match: {name: 'a\0b'}\n", ["not valid YAML", "special characters"]),
        ("- match: {name: 'a{99999999999999999999}'}\n  replace: {}\n", ["line 1", "regular expression"]),
        (
            "- match: {name: a}\n  replace: {kwargs: {generate_device: 2001-13-45}}\n",
            ["line 2", "generate_device cannot be read"],
        ),
        (f"- match: {{name: a}}\n  replace: {{class: {HYBRID}, kwargs: {{gpu_experts: 0-9999999}}}}\n", ["0-9999999"]),
        ("- match: {name: a}\n  replace: {kwargs: {generate_device: 'cuda:9999'}}\n", ["line 2", "cuda:9999"]),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_with_its_line(text: str, words: list[str]) -> None:
    told = refusal(text)
    assert told.startswith("r.yaml")
    for word in words:
        assert word in told, told


@given(st.text(alphabet="-: \n[]{}'\"abc&*!#|>", max_size=60))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    try:
        read = rules.parse(text)
    except BadInput as fault:
        assert fault.hint
    else:
        assert all(rule.replace.class_name in rules.REPLACEMENTS for rule in read)


def test_files_that_are_not_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not UTF-8"):
        rules.load(tmp_path / "binary.yaml")
    with pytest.raises(BadInput, match="cannot be read"):
        rules.load(tmp_path / "absent.yaml")
    with pytest.raises(BadInput, match="cannot be read"):
        rules.load(tmp_path)


@pytest.mark.parametrize(
    ("value", "ids"), [("0-3,17", (0, 1, 2, 3, 17)), ("", ()), ([3, 1], (1, 3)), (5, (5,)), ("all", None)]
)
def test_expert_ids_in_their_forms(value: object, ids: tuple[int, ...] | None) -> None:
    assert rules.expert_ids(value) == ids


def test_reading_rules_needs_no_torch() -> None:
    code = "import sys, ktplan.rules; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
