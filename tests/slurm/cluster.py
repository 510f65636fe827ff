"""A throw-away SLURM cluster on one machine: one controller, several node daemons, nothing outside one folder.

Only the links in /etc/slurm lie elsewhere, because the job step of Snakemake's plugin drops SLURM_CONF; a configuration
that is not ours is never replaced.  The nodes share this machine's cores: no time measured here means anything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

PACKAGES = ("munge", "slurm-client", "slurmctld", "slurmd")
PROGRAMS = ("munged", "sbatch", "slurmctld", "slurmd")
SYSTEM = Path("/etc/slurm")
FILES = ("slurm.conf", "cgroup.conf")

CONF = """\
ClusterName=lmperf-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
StateSaveLocation={dir}/state
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmdLogFile={dir}/slurmd.%n.log
SlurmdSpoolDir={dir}/spool/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={dir}/task-prolog
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
ReturnToService=2
SlurmdTimeout=30
KillWait=3
MinJobAge=3600
SchedulerParameters=sched_interval=2,bf_interval=5
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=1-00:00:00 DefaultTime=00:10:00 State=UP
"""

#: Every node gets a lock file of its own, as on separate machines.
PROLOG = '#!/bin/sh\necho "export LMPERF_LOCK={dir}/lock.$SLURMD_NODENAME"\n'


class Unavailable(RuntimeError):
    """The cluster cannot be had here, for a reason that is no fault of the project."""


def install() -> None:
    """Install Debian's packages where they are missing; raises `Unavailable`."""
    if os.geteuid() != 0:
        raise Unavailable("it needs root")
    if all(shutil.which(name) for name in PROGRAMS):
        return
    if not shutil.which("apt-get"):
        raise Unavailable("SLURM is not installed and there is no apt-get")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", "-qq", *words], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"apt-get {words[0]} failed: {done.stderr.strip().splitlines()[-1:]}")


def ask(*words: str, seconds: float = 20) -> str:
    """The output of a SLURM command; empty when it fails or does not answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def wait_for(what: str, test: Callable[[], object], seconds: float) -> None:
    """Wait until `test()` holds; raises `TimeoutError` that says what was waited for."""
    deadline = time.monotonic() + seconds
    while not test():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.3)


@dataclass
class Cluster:
    """Controller and nodes below one folder; use as a context manager."""

    dir: Path
    count: int = 3
    cpus: int = 2
    port: int = 26917

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return [f"lab{number}" for number in range(1, self.count + 1)]

    def __enter__(self) -> Cluster:
        self.write()
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def write(self) -> None:
        """Write the configuration and link it to where SLURM's programs look for it."""
        for name in ("state", "spool"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        host = socket.gethostname().split(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={self.port + number} CPUs={self.cpus} "
            f"RealMemory=16000 Feature={'old' if number == self.count else 'new'} State=UNKNOWN"
            for number, name in enumerate(self.nodes, 1)
        ]
        text = CONF.format(host=host, port=self.port, dir=self.dir, nodes="\n".join(lines))
        (self.dir / "slurm.conf").write_text(text)
        (self.dir / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused; keeps slurmd from looking for one
        (self.dir / "task-prolog").write_text(PROLOG.format(dir=self.dir))
        (self.dir / "task-prolog").chmod(0o755)
        key = self.dir / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self.dir.chmod(0o755)
        SYSTEM.mkdir(exist_ok=True)
        for name in FILES:
            place = SYSTEM / name
            if place.is_symlink() and not place.exists():
                place.unlink()  # left by a cluster whose folder is gone
            if place.exists() or place.is_symlink():
                raise Unavailable(f"{place} belongs to another cluster")
        for name in FILES:
            (SYSTEM / name).symlink_to(self.dir / name)

    def up(self) -> None:
        """Start munged, the controller and all nodes, and wait until they are idle."""
        folder = self.dir
        self.start(
            "munged", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        self.start("slurmctld", "-f", f"{folder}/slurm.conf")
        wait_for("the controller answers", lambda: "UP" in ask("scontrol", "ping"), 30)
        for name in self.nodes:
            self.start_node(name)
        wait_for("all nodes are idle", lambda: self.states().count("idle") == self.count, 60)

    def start(self, *words: str) -> None:
        """Start one daemon, which goes into the background by itself."""
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise Unavailable(f"{words[0]} does not start: {done.stderr.strip() or done.stdout.strip()}")

    def start_node(self, name: str) -> None:
        """Start one node's daemon."""
        (self.dir / "spool" / name).mkdir(exist_ok=True)
        self.start("slurmd", "-N", name, "-f", f"{self.dir}/slurm.conf")

    def states(self) -> list[str]:
        """The nodes' states in short."""
        return ask("sinfo", "-h", "-N", "-o", "%t").split()

    def queue(self) -> list[dict[str, str]]:
        """The jobs that are in the queue: number, node, state, and the rule in the comment."""
        lines = ask("squeue", "-h", "-o", "%i|%N|%T|%k").splitlines()
        return [dict(zip(("job", "node", "state", "rule"), line.split("|", 3), strict=True)) for line in lines]

    def power_off(self, name: str) -> None:
        """End a node as a power cut does: its daemon and all that it runs die at one moment."""
        doomed = []
        for process in psutil.process_iter(["name", "cmdline"]):
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("SLURMD_NODENAME") == name
                if ours or (process.info["name"] == "slurmd" and name in process.info["cmdline"]):
                    doomed.append(process)
        doomed += [step for step in self._steps(name) if step not in doomed]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        ask("scontrol", "update", f"nodename={name}", "state=down", "reason=power")

    def _steps(self, name: str) -> list[psutil.Process]:
        jobs = [entry["job"] for entry in self.queue() if entry["node"] == name]
        found = []
        for process in psutil.process_iter(["cmdline"]):
            title = " ".join(process.info["cmdline"] or ())
            if title.startswith("slurmstepd:") and any(f"[{job}." in title for job in jobs):
                found.append(process)
        return found

    def power_on(self, name: str) -> None:
        """Bring a node back."""
        (self.dir / f"slurmd.{name}.pid").unlink(missing_ok=True)
        self.start_node(name)
        ask("scontrol", "update", f"nodename={name}", "state=resume")

    def down(self) -> None:
        """Cancel what runs, stop exactly our daemons (by their pid files), and take the links away."""
        if "UP" in ask("scontrol", "ping"):
            ask("scancel", "--user", "root", "--state=PENDING")
            ask("scancel", "--user", "root", "--state=RUNNING")
            with contextlib.suppress(TimeoutError):
                wait_for("the queue is empty", lambda: not self.queue(), 20)
        for file in [*self.dir.glob("slurmd.*.pid"), self.dir / "slurmctld.pid", self.dir / "munged.pid"]:
            stop(file)
        for name in FILES:
            place = SYSTEM / name
            if place.is_symlink() and place.readlink() == self.dir / name:
                place.unlink()


def stop(file: Path) -> None:
    """End the daemon of a pid file, if that process still is that daemon."""
    try:
        process = psutil.Process(int(file.read_text()))
        if process.name() != file.name.split(".")[0]:
            return
        process.terminate()
        process.wait(10)
    except psutil.TimeoutExpired:
        process.kill()
    except (OSError, ValueError, psutil.Error):
        return
