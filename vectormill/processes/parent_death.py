"""Replace this process by another program that dies with its parent.

Changes the user if UID and GID are given, requests a parent-death signal, then calls exec. Run as a script by
`vectormill.processes.lifetimes.spawn`, between fork and the real program, because a preexec_fn is not safe in
a parent with threads. Imports only the standard library, and all of it while still root, because the other
user may not be able to read it. UID and GID -1 mean no change; PROGRAM is a path:

    python -I -S parent_death.py PARENT_PID SIGNAL UID GID PROGRAM [ARGUMENT …]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def request_death_signal(death_signal: int, parent_pid: int) -> None:
    """Request the signal for this process when the thread that forked it ends. Only Linux supports this.

    If the parent has ended before the request, the signal is sent at once.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), death_signal)


def main(arguments: list[str]) -> int:
    """Execute the program in place of this process; return an exit status only if that fails."""
    parent_pid, death_signal, uid, gid = (int(argument) for argument in arguments[:4])
    program = arguments[4:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # a shell's `&` ignores SIGINT, which exec would inherit
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        if uid >= 0:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        # This comes after the change of user, which clears the parent-death signal.
        request_death_signal(death_signal, parent_pid)
        os.execv(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]} cannot be started: {error.strerror}.\n")
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
