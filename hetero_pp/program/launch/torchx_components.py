"""TorchX components that run a part of a run as a job, on any scheduler that TorchX supports.

torchx run -s slurm hetero_pp/program/launch/torchx_components.py:part --only dc --config run.yaml --exchange HOST:PORT
"""

# No `from __future__ import annotations`: TorchX reads argument types from the annotations themselves.
from torchx import specs


def part(
    config: str,
    only: str,
    exchange: str,
    token_file: str = "token",
    nodes: int = 1,
    gpus: int = 8,
    cpus: int = 32,
    memory_gb: int = 256,
    runs: str = "runs",
    image: str = "hetero-pp",
) -> specs.AppDef:
    """Return a job that runs `hetero-pp launch --only`.

    Args:
        config: the YAML of the run, as the job sees it
        only: name of a replica or of one stage
        exchange: HOST:PORT of the exchange
        token_file: the file with the run's token, as the job sees it
        nodes: machines of the replica, as its YAML says
        gpus: GPUs of each machine
        cpus: CPUs of each machine
        memory_gb: memory of each machine in GB
        runs: folder of logs and saved states, shared by all machines
        image: container image with hetero-pp, for schedulers that start containers
    """
    arguments = ["launch", config, "--only", only, "--exchange", exchange]
    role = specs.Role(
        name=only.replace(".", "-"),
        image=image,
        entrypoint="hetero-pp",
        args=[*arguments, "--token-file", token_file, "--runs", runs],
        num_replicas=nodes,
        resource=specs.Resource(cpu=cpus, gpu=gpus, memMB=memory_gb * 1024),
    )
    return specs.AppDef(name=f"hetero-pp-{role.name}", roles=[role])
