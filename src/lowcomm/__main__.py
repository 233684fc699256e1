"""The command line: `lowcomm TOOL ...`, or `python -m lowcomm TOOL ...`."""

import importlib
import sys

from lowcomm import __version__

TOOLS = {
    "demo": "DiLoCo against synchronous data parallel on two local workers",
    "bench": "speed, rate and error of codecs",
    "bench-engine": "what the optimizers cost beside the work they wrap",
    "bench-sync": "compressed all-reduces beside gloo's, on this machine or over a limited link",
    "run": "train with one method: `lowcomm run RECIPE`",
    "compare": "any methods and codecs side by side, at equal tokens",
    "plan": "what a network's bandwidth does to a method: bytes, time per round, utilisation",
}

USAGE = (
    "usage: lowcomm TOOL [options]\n\ntools:\n"
    + "".join(f"  {name:<13} {text}\n" for name, text in TOOLS.items())
    + "\n`lowcomm TOOL --help` lists a tool's options."
)


def main(argv: list[str] | None = None) -> int:
    """Run one tool and return its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--version"]:
        print(__version__)
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    name = arguments[0]
    if name not in TOOLS:
        print(f"lowcomm: unknown tool {name!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    tool = importlib.import_module(f"lowcomm.recipes.{name.replace('-', '_')}")
    try:
        return int(tool.main(arguments[1:]) or 0)
    except KeyboardInterrupt:
        print(f"\nlowcomm {name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError) as error:
        print(f"lowcomm {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
