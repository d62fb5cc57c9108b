"""Become another program that dies with its parent: give up root if told to, ask for the signal, then exec.

Run as a script by `vectormill.processes.lifetimes.spawn`, between fork and the real program, because code there must
not run as a preexec_fn (not safe in a parent with threads). Knows nothing of Vectormill and imports the standard
library only, all of it while still root: the other user may not be able to read it. UID and GID -1 mean to stay
who we are; PROGRAM is a path:

    python -I -S leash.py PARENT_PID SIGNAL UID GID PROGRAM [ARGUMENT …]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def hold_to_parent(death_signal: int, parent_pid: int) -> None:
    """Ask Linux to send this process the signal when the thread that forked it ends; elsewhere does nothing.

    The parent may have ended before the request: then the signal is delivered here and now.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), death_signal)


def main(arguments: list[str]) -> int:
    """Do not return when all goes well: the process is then the program."""
    parent_pid, death_signal, uid, gid = (int(argument) for argument in arguments[:4])
    program = arguments[4:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # a shell's `&` ignores SIGINT, and exec would pass that on
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        if uid >= 0:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        # Only now: a change of credentials clears the parent-death signal.
        hold_to_parent(death_signal, parent_pid)
        os.execv(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]} cannot be started: {error.strerror}.\n")
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
