"""A `docker` whose containers are children of a daemon, not of the command; the daemon is the test."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_DOCKER"])


def main(arguments: list[str]) -> int:
    if arguments[0] == "rm":
        name = arguments[-1]
        (FOLDER / f"rm-{name}").touch()
        while (FOLDER / f"running-{name}").exists():
            time.sleep(0.02)
        return 0
    name = arguments[arguments.index("--name") + 1]
    command = arguments[arguments.index("image") + 1 :]
    scratch = FOLDER / f".{name}"
    scratch.write_text(json.dumps({"command": command, "key": os.environ["VLLM_API_KEY"]}))
    scratch.rename(FOLDER / f"run-{name}")
    time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
