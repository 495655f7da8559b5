"""The package starts fast and keeps its rooms apart."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ktplan


def loaded_after(code: str) -> set[str]:
    """The top-level packages a fresh interpreter has loaded after running `code`."""
    show = f"import sys\n{code}\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run(
            [sys.executable, "-c", show], capture_output=True, text=True, check=True
        ).stdout.split()
    )


HELP = """
from ktplan.cli.main import root
from click.testing import CliRunner
assert not CliRunner().invoke(root, [{}]).exit_code
"""


def test_help_loads_nothing_heavy() -> None:
    assert not loaded_after(HELP.format("'--help'")) & {
        "numpy",
        "torch",
        "transformers",
        "yaml",
        "rich",
        "pandas",
        "matplotlib",
    }


@pytest.mark.parametrize(
    "command", ["doctor", "inspect", "convert-cpu", "place", "profile", "emit", "run", "eval", "demo"]
)
def test_the_help_of_a_command_never_loads_torch(command: str) -> None:
    assert not loaded_after(HELP.format(f"'{command}', '--help'")) & {"torch", "transformers"}


def test_inspecting_never_loads_torch() -> None:
    code = "from click.testing import CliRunner\nfrom ktplan.cli.main import root\n"
    code += "assert not CliRunner().invoke(root, ['inspect', 'tiny']).exit_code"
    assert not loaded_after(code) & {"torch", "transformers"}


def test_public_names_are_sorted_and_there() -> None:
    assert sorted(ktplan.__all__) == ktplan.__all__
    for name in ktplan.__all__:
        assert getattr(ktplan, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ktplan.nonsense  # noqa: B018


def test_the_rooms_import_downwards_only() -> None:
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    assert lint_imports(no_cache=True) == EXIT_STATUS_SUCCESS
