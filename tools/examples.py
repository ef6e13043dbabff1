"""Run the Python examples of Markdown files as they stand, each file in one fresh namespace."""

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(path: Path) -> int:
    """Execute every python block of ``path`` in order; return how many there were."""
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        # Blank lines in front make tracebacks name the line of the Markdown file.
        exec(compile("\n" * line + block[1], str(path), "exec"), namespace)
    return len(blocks)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        count = run(Path(name))
        if not count:
            raise SystemExit(f"{name} has no python example")
        print(f"{name}: {count} python examples ran")
