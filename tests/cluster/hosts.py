"""Several hosts on this one machine, as a real cluster has them: their own network, names, sshd and Slurm.

A host is a shell in namespaces of its own, joined to the others by a bridge that has one as well: the
machine's network and daemons are never touched. Hosts share all files but /run, /dev/shm and some of /etc.
"""

from __future__ import annotations

import os
import secrets
import select
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.conftest import BIN, GRACE, MPI_VARIABLES, ROOT
from tests.vehicles.requirements import SYSTEM_BIN

# Seconds that any step of the start-up may take, on a machine that does other things as well.
PATIENCE = 30.0
# Seconds between two questions about what Slurm gives no notice of.
PAUSE = 0.05
# Slurm's states of a job that will not change any more.
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"} | {
    *("BOOT_FAIL", "DEADLINE", "PREEMPTED")
}
# Slurm's states of a node that has work or takes some.
SERVING = {"idle", "mixed", "allocated", "completing"}
MUNGE_SOCKET = "/run/munge.socket"


class Cluster:
    """Hosts h0, h1, ... at 10.77.0.10, .11, ..., from ``with`` to its end; start it from the main thread.

    Each reaches the others through sshd, and is a node of 4 CPUs and two GPUs that are played; h0 is the
    controller. With ``ipv6`` they are at fd77::10, ... alone, without sshd and Slurm. Needs what the
    requirement "cluster" asks for; raises ``RuntimeError`` with the ends of all logs where something does
    not come up. Everything dies with this process, even where that is killed.
    """

    def __init__(self, *, ipv6: bool = False) -> None:
        network = "fd77::" if ipv6 else "10.77.0."
        self._addresses = {f"h{index}": f"{network}{10 + index}" for index in range(2)}
        # nodad: else the kernel first looks, for a second, whether another has the address.
        self._mask = "64 dev eth0 nodad" if ipv6 else "24 dev eth0"
        self._serves = not ipv6
        self._shells: dict[str, _Shell] = {}

    def __enter__(self) -> Cluster:
        # The kernel ends a child along with the thread that started it, not with the process.
        assert threading.current_thread() is threading.main_thread()
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="dualeval-cluster-"))
            stack.callback(shutil.rmtree, self.folder)
            (self.folder / "logs").mkdir()
            (self.folder / "home").mkdir()
            self._start_hosts(stack)
            if self._serves:
                self._start_ssh()
                self._start_slurm()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts."""
        return list(self._addresses)

    @property
    def variables(self) -> Mapping[str, str]:
        """What a command on a host needs in its environment, beside what every command of a test gets."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")} if self._serves else {}

    def address(self, host: str) -> str:
        """The address at which the other hosts reach a host."""
        return self._addresses[host]

    def on(self, host: str, command: Sequence[str | Path]) -> list[str]:
        """The words that run a command on a host, in the folder where they are started.

        The first process of them stays outside and waits: it hands on the command's end, but no signal.
        """
        target = f"/proc/{self._shells[host].pid}/ns"
        spaces = [f"--{name}={target}/{file}" for name, file in _NAMESPACES.items()]
        # nsenter itself could only keep the folder as the machine sees it, with another /run and /dev/shm.
        enter = f'exec nsenter {shlex.join(spaces)} -- env --chdir="$PWD" -- "$@"'
        return ["sh", "-c", enter, host, *map(str, command)]

    def wait_for_job(self, job_id: str | int, timeout_s: float) -> str:
        """Wait until a Slurm job has ended; returns its final state, as ``COMPLETED`` or ``FAILED``."""
        question = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"]
        return self._ask(question, ENDS, timeout_s)

    def wait_for_restart(self, job_id: str | int, restarts: int, timeout_s: float = PATIENCE) -> None:
        """Wait until Slurm has requeued a job so many times, and then until it runs again or has ended.

        Slurm alone would start it only when the job's earlier credentials have expired.
        """
        question = [
            *("squeue", "--noheader", "--states=all", f"--jobs={job_id}"),
            "--Format=RestartCnt:4,State:20",
        ]
        begun = {f"{restarts:<4}{state}" for state in {"RUNNING", *ENDS}}
        waiting = f"{restarts:<4}PENDING"
        if self._ask(question, {waiting, *begun}, timeout_s) == waiting:
            # A host refuses credentials from the second in which it gave up the earlier ones. A job that
            # has begun meanwhile refuses this, as it may.
            self._call(["scontrol", "update", f"jobid={job_id}", "starttime=now+1"])
            self._ask(question, begun, timeout_s)

    @contextmanager
    def without_cable(self, host: str) -> Iterator[None]:
        """Pull a host's cable: it and the others hear nothing of each other, but run on."""
        try:
            self._set_cable(host, "down")
            yield
        finally:
            self._set_cable(host, "up")

    def processes(self, host: str, *, daemons: bool = False) -> list[psutil.Process]:
        """The living processes of a host, as this machine numbers them, but for its shell."""
        shell = psutil.Process(self._shells[host].pid)
        shells = [shell, *shell.children()]
        own = Path(f"/proc/{shell.pid}/ns/pid_for_children").stat()
        found = []
        for process in psutil.process_iter(["name", "status"]):
            # Gone meanwhile, or not for us to look at: no host's.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                space = Path(f"/proc/{process.pid}/ns/pid").stat()
                alive = process not in shells and process.info["status"] != psutil.STATUS_ZOMBIE
                if alive and os.path.samestat(space, own):
                    found.append(process)
        return [process for process in found if daemons or process.info["name"] not in _DAEMONS]

    def lose(self, host: str) -> None:
        """Have Slurm lose a node: all that it runs there is gone at once, and its jobs are requeued or fail.

        A job is requeued if it was submitted with ``--requeue``. What Slurm did not start there goes on.
        """
        ended = []
        while lost := [
            process for process in self.processes(host, daemons=True) if _is_slurms(process, host)
        ]:
            for process in lost:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            ended += lost
            psutil.wait_procs(lost, timeout=GRACE)
        assert ended, f"{host} is lost already"
        # Slurm would find out by itself: after 26 s with a SlurmdTimeout of 5, and 300 is the default.
        order = ["scontrol", "update", f"nodename={host}", "state=down", "reason=lost"]
        done = self._call(order)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(order)}: {done.stderr.strip()}")

    def bring_back(self, host: str) -> None:
        """Start a lost node again, without any memory of its jobs, and wait until Slurm may use it.

        Only where a test has a cluster of its own: to ``no_leaks`` a new daemon of a shared one is a leak.
        """
        _obey({self._shells[host]: f"rm -rf /run/slurmd/* /run/job/*\n{_SLURMD.format(host=host)}"})
        self._ask(["sinfo", "--noheader", f"--nodes={host}", "--format=%T"], SERVING, PATIENCE)

    def _set_cable(self, host: str, state: str) -> None:
        # The bridge's shell would end with a command that fails.
        assert host in self._shells, host
        _obey({self._bridge: f"ip link set {host} {state}"})

    def _start_hosts(self, stack: ExitStack) -> None:
        logs = self.folder / "logs"
        self._bridge = _Shell(["--net"], self.variables, logs / "bridge.log")
        stack.callback(self._bridge.end)
        for host in self.hosts:
            kinds = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            self._shells[host] = _Shell(kinds, self.variables, logs / f"{host}.log")
            stack.callback(self._shells[host].end)
        _obey({self._bridge: "ip link add br0 type bridge\nip link set br0 up"})
        _obey({shell: self._furnish(host) for host, shell in self._shells.items()})
        cables = [
            f"ip link add {host} master br0 up type veth peer name eth0 netns {shell.pid}"
            for host, shell in self._shells.items()
        ]
        _obey({self._bridge: "\n".join(cables)})
        self._on_all(f"ip address add {{address}}/{self._mask}\nip link set eth0 up")

    def _furnish(self, host: str) -> str:
        """Write a host's own files; returns the commands that put them in place."""
        files = {
            "/etc/hostname": f"{host}\n",
            "/etc/hosts": hosts_file(host, self._addresses),
            # Without a name server each look-up in DNS would take seconds.
            "/etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        }
        if self._serves:
            files["/etc/ssh/ssh_config"] = ssh_config(self.folder)
            # The machine's root may be locked out, or have settings at home that no test is to depend on.
            files["/etc/shadow"] = "root:*:19000::::::\n"
            files["/etc/passwd"] = f"root:x:0:0::{self.folder}/home:/bin/bash\nsshd:x:74:65534::/run/sshd:\n"
        commands = [f"hostname {host}"]
        for name, text in files.items():
            own = self.folder / host / name.lstrip("/")
            own.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(text)
            commands.append(f"mount --bind {shlex.quote(str(own))} {name}")
        commands += [f"mount -t tmpfs -o mode={mode} tmpfs {on}" for on, mode in _OWN_FOLDERS.items()]
        commands += ["mkdir /run/sshd /run/slurmd /run/job", "ip link set lo up"]
        return "\n".join(commands)

    def _start_ssh(self) -> None:
        for key in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", self.folder / key]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (self.folder / "known_hosts").write_text(f"* {(self.folder / 'host_key.pub').read_text()}")
        (self.folder / "sshd_config").write_text(sshd_config(self.folder, self.variables))
        # sshd starts itself again for each connection, and so has to know where it is; it writes its
        # process id once it listens.
        self._on_all(
            '"$(command -v sshd)" -f {folder}/sshd_config -E {folder}/logs/sshd-{host}.log\n'
            "until [ -s /run/sshd.pid ]; do sleep 0.01; done"
        )

    def _start_slurm(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(64))
        (self.folder / "slurm.conf").write_text(slurm_conf(self.folder, self._addresses))
        # Two GPUs a node for Slurm to count; Slurm hands files out, and asks no driver.
        for number in range(2):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        # By force, as munged refuses a temporary folder that others may write to. It returns once it serves.
        self._on_all(
            f"munged --force --socket={MUNGE_SOCKET} --pid-file=/run/munged.pid --seed-file=/run/munged.seed"
            " --key-file={folder}/munge.key --log-file={folder}/logs/munged-{host}.log"
        )
        log = shlex.quote(str(self.folder / "logs" / "slurmctld.log"))
        # A node that finds no controller asks again only after a second.
        wait = "until scontrol ping > /dev/null; do kill -0 $!; sleep 0.01; done"
        _obey({self._shells["h0"]: f"slurmctld -D >> {log} 2>&1 &\n{wait}"})
        self._on_all(_SLURMD)
        self._ask(["sinfo", "--noheader", "--format=%T %D"], {f"idle {len(self.hosts)}"}, PATIENCE)

    def _on_all(self, commands: str) -> None:
        """Have every host run commands with ``{host}``, its ``{address}`` and the ``{folder}`` filled in."""
        folder = shlex.quote(str(self.folder))
        _obey(
            {
                shell: commands.format(host=host, address=self.address(host), folder=folder)
                for host, shell in self._shells.items()
            }
        )

    def _ask(self, question: Sequence[str], answers: set[str], timeout_s: float) -> str:
        """Ask Slurm a question until it gives one of the answers; returns that."""
        deadline = time.monotonic() + timeout_s
        while True:
            done = self._call(question)
            if (answer := done.stdout.strip()) in answers:
                return answer
            if time.monotonic() > deadline:
                said = f"{answer or done.stderr.strip()!r} after {timeout_s:g} s, none of {sorted(answers)}"
                raise RuntimeError(f"{shlex.join(question)} says {said}\n{tails(self.folder / 'logs')}")
            time.sleep(PAUSE)

    def _call(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **self.variables}
        called = self.on("h0", command)
        return subprocess.run(called, env=variables, text=True, capture_output=True, timeout=PATIENCE)


# What nsenter and /proc call a host's namespaces; unshare is outside of the last, and its child in it.
_NAMESPACES = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt", "pid": "pid_for_children"}
# What hosts on a shared file system do not share, and who may write there.
_OWN_FOLDERS = {"/run": "755", "/dev/shm": "1777"}
_DAEMONS = {"sshd", "munged", "slurmctld", "slurmscriptd", "slurmd"}
_SLURMD = "slurmd -N {host}"


class _Shell:
    """A shell in new namespaces: it runs what it is told, and ends along with the one who tells."""

    def __init__(self, namespaces: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._log = log
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), SYSTEM_BIN))
        with log.open("ab") as stream:
            # The signal ends it with a killed test; where that was set too late, the end of its input does.
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "--norc", "-e"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**os.environ, "PATH": path, **variables},
                bufsize=0,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """A process in the namespaces, which is no other's as long as the shell has not been ended."""
        return self._process.pid

    def tell(self, commands: str) -> None:
        """Have commands run, with what they print in the log."""
        assert self._process.stdin is not None
        # Where the shell is gone, its missing answer says so.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{{\n{commands}\n}} </dev/null >&2\necho\n".encode())

    def answer(self) -> None:
        """Wait until the commands are through; raises ``RuntimeError`` where one of them failed."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        if not ready or not self._process.stdout.read(1):
            found = "failed" if ready else f"hung for {PATIENCE:g} s"
            raise RuntimeError(f"{self._log.stem} {found}\n{tails(self._log.parent)}")

    def end(self) -> None:
        """Kill the shell and, where it is the first process of its namespace, all others there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for process in psutil.Process(self._process.pid).children() or [self._process]:
            # A shell that failed ends by itself.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        # unshare is gone when its child is, and that is gone when all others of the host are.
        self._process.wait(GRACE)


def _obey(commands: Mapping[_Shell, str]) -> None:
    """Have shells run their commands, all at the same time."""
    for shell, words in commands.items():
        shell.tell(words)
    for shell in commands:
        shell.answer()


def _is_slurms(process: psutil.Process, host: str) -> bool:
    """Whether a process is Slurm's on its host: the daemon, and what a job has there, orphans included."""
    try:
        started = process.environ().get("SLURMD_NODENAME") == host
        return started or process.info["name"] in {"slurmd", "slurmstepd"}
    except psutil.NoSuchProcess:
        return False


def tails(folder: Path, characters: int = 2000) -> str:
    """The ends of all logs in a folder."""
    texts = {path.name: path.read_text(errors="replace").strip() for path in sorted(folder.iterdir())}
    return "\n".join(f"--- {name}\n{text[-characters:]}" for name, text in texts.items() if text)


def hosts_file(host: str, addresses: Mapping[str, str]) -> str:
    """A host's /etc/hosts as Debian's installer writes it: its own name is a loopback address."""
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {host}"]
    lines += [f"{address} {name}" for name, address in addresses.items() if name != host]
    return "".join(f"{line}\n" for line in lines)


def ssh_config(folder: Path) -> str:
    """What every ssh client of a host reads."""
    return f"""\
IdentityFile "{folder}/user_key"
IdentitiesOnly yes
GlobalKnownHostsFile "{folder}/known_hosts"
UserKnownHostsFile /dev/null
StrictHostKeyChecking yes
BatchMode yes
ConnectTimeout 10
"""


def sshd_config(folder: Path, variables: Mapping[str, str]) -> str:
    """Settings of every host's sshd; a command finds the project as if its environment were activated."""
    path = f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    session = {"PATH": path, "PYTHONPATH": str(ROOT), **MPI_VARIABLES, **variables}
    return f"""\
ListenAddress 0.0.0.0
HostKey "{folder}/host_key"
AuthorizedKeysFile "{folder}/user_key.pub"
PidFile /run/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 200
SetEnv {" ".join(f'"{name}={value}"' for name, value in session.items())}
"""


def slurm_conf(folder: Path, addresses: Mapping[str, str]) -> str:
    """Slurm's settings: h0 controls, and addresses stand for names, as a host's own leads to itself."""
    nodes = [f"NodeName={name} NodeAddr={address} CPUs=4 Gres=gpu:2" for name, address in addresses.items()]
    # PMIx puts its sockets into TmpFS, under names that the nodes of a job have in common.
    return "\n".join(
        [
            "ClusterName=dualeval",
            f"SlurmctldHost=h0({addresses['h0']})",
            "SlurmUser=root",
            "SlurmdUser=root",
            "MailProg=/bin/true",
            "AuthType=auth/munge",
            # A requeued job waits for its credentials to expire. Slurm takes less than 5 s for 120 s.
            f"AuthInfo=socket={MUNGE_SOCKET},cred_expire=5",
            "MpiDefault=none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "GresTypes=gpu",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",
            # Not SlurmdTimeout: a host that is cut off or stopped for a while stays a node.
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1",
            "ReturnToService=2",
            "KillWait=5",
            "MinJobAge=300",
            f"StateSaveLocation={folder}/state",
            f"SlurmdLogFile={folder}/logs/slurmd-%n.log",
            "SlurmctldPidFile=/run/slurmctld.pid",
            "SlurmdPidFile=/run/slurmd.pid",
            "SlurmdSpoolDir=/run/slurmd",
            "TmpFS=/run/job",
            *nodes,
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "",
        ]
    )
