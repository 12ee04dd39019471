"""Run every benchmark and write the results page: about 40 minutes on two idle cores.

    python benchmarks/all.py --ppo-python ../trl112/bin/python

Needs an environment with ``pip install -e ".[bench]"``; the PPO race runs in a second one, with TRL 1.12.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from docs_page import PAGE

HERE = Path(__file__).parent
# Name, script and options; a race with three sides says all that one with two does.
RUNS = {
    "tiny and long": ["floor.py", "--work", "tiny-spread,long"],
    "full lengths": ["vs_trl.py", "--work", "tiny-full"],
    "ppo": ["vs_trl.py", "--work", "ppo-spread"],
    "small": ["floor.py", "--work", "small-spread"],
    "two threads": ["vs_trl.py", "--work", "small-spread", "--threads", "2"],
    "dead groups": ["vs_trl.py", "--work", "dead"],
    "scaling": ["scaling.py"],
    "memory": ["memory.py"],
    "leak": ["leak.py"],
    "weak scaling": ["weak_scaling.py"],
}


def main() -> None:
    """Run, then write the page."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ppo-python", help="interpreter of an environment with trl==1.12.0; without it, no PPO race")
    options.add_argument("--only", help=f"some of: {', '.join(RUNS)}; several with commas")
    options.add_argument("--quick", action="store_true", help="each benchmark's quick form; the page stays as it is")
    options.add_argument("--out", default=PAGE, help="page to write the results into")
    arguments = options.parse_args()
    chosen = list(RUNS) if arguments.only is None else arguments.only.split(",")
    if unknown := [name for name in chosen if name not in RUNS]:
        raise SystemExit(f"no such run: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    if arguments.ppo_python is None and "ppo" in chosen:
        print("no --ppo-python given: the PPO race is left out")
        chosen.remove("ppo")
    for name in chosen:
        script, *rest = RUNS[name]
        python = arguments.ppo_python if name == "ppo" else sys.executable
        started = time.perf_counter()
        print(f"== {name}", flush=True)
        command = [python, str(HERE / script), *rest, *(["--quick"] if arguments.quick else [])]
        if subprocess.run(command).returncode:
            raise SystemExit(f"{name} failed")
        print(f"== {name}: {time.perf_counter() - started:.0f} s\n", flush=True)
    if not arguments.quick:
        subprocess.run([sys.executable, str(HERE / "docs_page.py"), "--out", str(arguments.out)], check=True)


if __name__ == "__main__":
    main()
