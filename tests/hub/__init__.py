"""A small Hugging Face Hub on loopback, for the real client: downloads, uploads, rights, faults.

    with Hub({"org/name": {"a" * 40: {"config.json": b"{}", "model.safetensors": path}}}) as hub:
        subprocess.run(..., env={"HF_ENDPOINT": hub.url})

Files are bytes or paths; `*.safetensors` are stored with LFS. Nothing of Xet is spoken: a client
that uploads needs HF_HUB_DISABLE_XET=1.
"""

from .server import Hub as Hub
from .state import Account as Account
from .state import Fault as Fault
from .state import Repo as Repo
from .store import git_oid as git_oid
from .store import sha256 as sha256
