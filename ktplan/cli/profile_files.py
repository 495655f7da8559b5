"""`ktplan profile merge | info | report | import | export`: profiles that exist."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktplan.cli.options import model_argument, output_options
from ktplan.cli.output import Output
from ktplan.errors import BadUsage
from ktplan.units import format_percent

if TYPE_CHECKING:
    from ktplan.model import ModelSpec
    from ktplan.profile import ActivationProfile
    from ktplan.profile.imports import Imported

_File = click.Path(path_type=Path)
_FOREIGN = (".pt", ".pth", ".gguf", ".dat", ".npy", ".npz", ".json", ".csv")
_ABOUT = ("readme.md", "license.txt", "license.md", "dataset_infos.json", "dataset_dict.json", "state.json")
_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


@click.command("merge")
@click.argument("profiles", nargs=-1, required=True, type=_File, metavar="PROFILE...")
@click.option(
    "--weights", metavar="W,W,...", help="How much each profile counts, e.g. 2,1.  [default: 1 each]"
)
@click.option(
    "--names", metavar="NAME,NAME,...", help="Name the data sets, to be told apart by report and place."
)
@click.option("-o", "--output", type=_File, required=True, help="The profile to write.")
@output_options
def merge_command(
    profiles: tuple[Path, ...], weights: str | None, names: str | None, output: Path, out: Output
) -> None:
    """Join profiles of one model, weighted.

    \b
    Example:
      ktplan profile merge code.safetensors chat.safetensors --weights 2,1 --names code,chat -o both.safetensors
    """
    from ktplan.profile import ActivationProfile
    from ktplan.profile.merge import merge

    numbers = None
    if weights is not None:
        try:
            numbers = [float(word) for word in weights.split(",")]
        except ValueError:
            raise BadUsage(f"--weights {weights} are no numbers", hint="write them like 2,1") from None
    loaded = [ActivationProfile.load(path) for path in profiles]
    made = merge(loaded, weights=numbers, names=names.split(",") if names else None)
    made.save(output)
    body = {"output": str(output), **about(made)}
    out.report("profile-merge", body, lambda: out.line(f"wrote {output}: {summary(made)}"))


@click.command("info")
@click.argument("profile_file", type=_File, metavar="PROFILE")
@output_options
def info_command(profile_file: Path, out: Output) -> None:
    """Say what a profile holds and what it promises on other text.

    \b
    Example:
      ktplan profile info profile.safetensors
    """
    from ktplan.profile import ActivationProfile, report
    from ktplan.profile.curves import hit_curve, transfer

    profile = ActivationProfile.load(profile_file)
    curve, matrix = hit_curve(profile, _RATIOS), transfer(profile, 0.3)
    body = {
        **about(profile),
        "curve": curve._asdict(),
        "transfer": matrix.to_dict() if matrix else None,
        "single_document_mass": report.single_document_mass(profile),
        "warnings": report.warnings(profile),
        "settings": dict(profile.settings),
        "files": [file._asdict() for file in profile.files],
    }

    def render() -> None:
        out.line(f"{profile_file}: {summary(profile)}")
        rows = []
        for place, ratio in enumerate(curve.ratios):
            row = [format_percent(ratio), format_percent(curve.in_sample[place])]
            if curve.held_out is not None and curve.low is not None and curve.high is not None:
                row += [
                    format_percent(curve.held_out[place]),
                    f"{format_percent(curve.low[place])} to {format_percent(curve.high[place])}",
                ]
            rows.append(row)
        head = ["experts", "in-sample", "held out", "5-95 %"]
        out.table(head[: len(rows[0])], rows, title="hit rate of the best experts", right=range(4))
        if matrix is not None:
            out.table(
                ["made from", *matrix.datasets],
                [
                    (name, *(f"{rate:.3f}" for rate in row))
                    for name, row in zip(matrix.datasets, matrix.rates, strict=True)
                ],
                title="hit rate at 30 % of the experts, by what is scored; the diagonal is held out",
                right=range(1, len(matrix.datasets) + 1),
            )

    out.report("profile-info", body, render)
    for warning in report.warnings(profile):
        out.warn(warning)


@click.command("report")
@click.argument("profile_file", type=_File, metavar="PROFILE")
@click.option("-o", "--output", type=_File, help="The page to write.  [default: beside the profile, .html]")
@click.option("--png", type=_File, help="Write all of it on one picture, too.")
@output_options
def report_command(profile_file: Path, output: Path | None, png: Path | None, out: Output) -> None:
    """Draw a profile: heat map, Lorenz curve, hit-rate curve, transfer matrix, on one page that stands alone.

    \b
    Example:
      ktplan profile report profile.safetensors -o profile.html
    """
    from ktplan.profile import ActivationProfile, pictures
    from ktplan.profile.page import save_page

    profile = ActivationProfile.load(profile_file)
    page = output or profile_file.with_suffix(".html")
    save_page(profile, page)
    if png:
        pictures.save_overview(profile, png)
    body = {"page": str(page), "png": str(png) if png else None, **about(profile)}
    out.report("profile-page", body, lambda: out.line(f"wrote {page}" + (f" and {png}" if png else "")))


@click.command("import")
@model_argument
@click.argument("source", type=_File, metavar="FILE")
@click.option(
    "-o",
    "--output",
    type=_File,
    default="profile.safetensors",
    show_default=True,
    help="The profile to write.",
)
@output_options
def import_command(model: Path, source: Path, output: Path, out: Output) -> None:
    """Turn counts that another tool recorded into a profile of MODEL.

    Reads SGLang's recorder (.pt, any mode), KTransformers' activation_stats.pt, llama.cpp's imatrix (.gguf), and
    counts or order lists as .csv, .json, .npz or .npy. Nothing in a .pt file is ever executed.

    \b
    Example:
      ktplan profile import ./model expert_distribution_recorder_17.pt -o profile.safetensors
    """
    from ktplan.model import read_spec

    found = imported(read_spec(model), source)
    found.profile.save(output)
    body = {"output": str(output), "notes": list(found.notes), **about(found.profile)}
    out.report("profile-import", body, lambda: out.line(f"wrote {output}: {summary(found.profile)}"))
    for note in found.notes:
        out.warn(note)


def imported(spec: ModelSpec, source: Path) -> Imported:
    """Counts of another tool, by the file's suffix."""
    if source.suffix in (".pt", ".pth"):
        from ktplan.runtime.recorder_file import read_recorder

        return read_recorder(spec, source)
    if source.suffix in (".gguf", ".dat"):
        from ktplan.profile.imatrix import read_imatrix

        return read_imatrix(spec, source)
    from ktplan.profile.imports import read_table

    return read_table(spec, source)


def read_profile(spec: ModelSpec, path: Path, out: Output) -> ActivationProfile:
    """A profile of this model, or counts of another tool, with a word about what those lack."""
    from ktplan.profile import ActivationProfile

    if path.suffix in _FOREIGN:
        found = imported(spec, path)
        for note in found.notes:
            out.note(f"{path}: {note}")
        return found.profile
    return ActivationProfile.load(path).for_model(spec)


@click.command("export")
@click.argument("profile_file", type=_File, metavar="PROFILE")
@click.option(
    "--layers", type=int, help="Layers of the model, dense ones too.  [default: up to the last MoE layer]"
)
@click.option("-o", "--output", type=_File, required=True, help="The .pt file to write.")
@output_options
def export_command(profile_file: Path, layers: int | None, output: Path, out: Output) -> None:
    """Write the counts as the .pt file that sglang-kt reads with --init-expert-location.

    \b
    Example:
      ktplan profile export profile.safetensors -o counts.pt
    """
    from ktplan.profile import ActivationProfile
    from ktplan.runtime.recorder_file import write_recorder

    profile = ActivationProfile.load(profile_file)
    least = profile.layers[-1] + 1
    if layers is not None and layers < least:
        raise BadUsage(f"--layers {layers} is below the last MoE layer", hint=f"give {least} or more")
    write_recorder(profile, output, layers=layers or least)
    out.report("profile-export", {"output": str(output)}, lambda: out.line(f"wrote {output}"))


def named_files(words: tuple[str, ...]) -> dict[Path, str]:
    """Files behind `[NAME=]FILE|FOLDER|PATTERN|hf:org/name|corpus:...`, each with its data set ("" where unnamed)."""
    from ktplan.profile.corpus import SUFFIXES

    found: dict[Path, str] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        if not equals or Path(word).exists() or "/" in name:
            name, rest = "", word
        files = _files_of(rest, SUFFIXES)
        for path in files:
            if path in found:
                raise BadUsage(
                    f"{path} is named twice", hint="name each file once: its documents would count double"
                )
            found[path] = name
    return found


def _files_of(word: str, suffixes: tuple[str, ...]) -> list[Path]:
    if word.startswith("corpus:"):
        from ktplan.model.embedded import corpus_files

        return list(corpus_files(word.removeprefix("corpus:")))
    path = Path(word)
    if word.startswith("hf:"):
        path = _cached(word.removeprefix("hf:"))
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in suffixes
            and file.is_file()
            and not (word.startswith("hf:") and file.name.lower() in _ABOUT)
        )
        if not inside:
            raise BadUsage(
                f"--dataset {word}: the folder has no text", hint=f"known are {', '.join(suffixes)}"
            )
        return inside
    if any(sign in word for sign in "*?["):
        root = Path(path.anchor) if path.is_absolute() else Path()
        inside = sorted(root.glob(str(path.relative_to(path.anchor))))
        inside = [file for file in inside if file.is_file()]
        if inside:
            return inside
        raise BadUsage(f"--dataset {word} matches no file", hint="put the pattern in quotes")
    raise BadUsage(f"--dataset {word} does not exist", hint="name text or jsonl files")


def _cached(name: str) -> Path:
    """The newest snapshot of a data set in the Hugging Face cache; nothing is downloaded."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"datasets--{name.replace('/', '--')}"
    snapshots = sorted((cache / "snapshots").glob("*"), key=lambda folder: folder.stat().st_mtime)
    if not snapshots:
        raise BadUsage(
            f"the data set {name} is not in the Hugging Face cache",
            hint=f"download it first; looked in {cache}",
        )
    return snapshots[-1]


def about(profile: ActivationProfile) -> dict[str, Any]:
    """The facts of a profile, for JSON."""
    return {
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "documents": profile.documents,
        "tokens": profile.token_count,
        "decode_tokens": profile.decode_token_count,
        "datasets": sorted(set(profile.dataset_of)),
        "ranked": profile.ranked is not None,
        "trace_tokens": profile.trace.tokens if profile.trace else 0,
    }


def summary(profile: ActivationProfile) -> str:
    """The facts in one line."""
    generated = f" ({profile.decode_token_count:,} generated)" if profile.decode_token_count else ""
    trace = f", trace of {profile.trace.tokens:,}" if profile.trace else ""
    return (
        f"{profile.model}, {profile.token_count:,} tokens{generated} in {profile.documents:,} documents of "
        f"{len(set(profile.dataset_of))} data sets{trace}"
    )
