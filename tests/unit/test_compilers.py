"""The processes with which torch compiles must not hold up the end of a stage."""

from __future__ import annotations

import subprocess
import sys
import textwrap

TIMEOUT_S = 120.0


def test_compiler_that_does_not_end_holds_nothing_up() -> None:
    """Torch waits for it at the process's end, unless it is being ended already."""
    program = """
        import threading
        from torch._inductor import async_compile, config
        from deepstack_serving.execution.compiled import end_compilers

        class Stuck:
            ending = threading.Event()

            def shutdown(self):
                if not self.ending.is_set():
                    self.ending.set()
                    threading.Event().wait()

        config.compile_threads = 8
        async_compile._pool_set.add(Stuck())
        end_compilers()
        print(Stuck.ending.wait(60), async_compile.get_compile_threads())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.split() == ["True", "1"]
