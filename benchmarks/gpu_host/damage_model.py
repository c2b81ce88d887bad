"""Copy a model with one layer's attention output projection scaled: `damage_model.py MODEL COPY --layer 10 --factor 8`.

What comes out loads and serves like the model and answers worse, as a kernel with a wrong scale does.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def damage(model: Path, copy: Path, *, layer: int, factor: float) -> str:
    """Write the copy and return the name of the tensor that was scaled.

    Raises ValueError where the model has no such layer.
    """
    wanted = f"layers.{layer}.self_attn.o_proj.weight"
    copy.mkdir(parents=True, exist_ok=True)
    scaled = None
    for path in sorted(model.iterdir()):
        if path.suffix != ".safetensors":
            if path.is_file():
                shutil.copy2(path, copy / path.name)
            continue
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensors[name] = file.get_tensor(name)
        for name in [name for name in tensors if name.endswith(wanted)]:
            tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
            scaled = name
        save_file(tensors, copy / path.name, metadata=metadata)
    if scaled is None:
        raise ValueError(f"{model}: holds no tensor that ends in {wanted}: choose another --layer")
    return scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("copy", type=Path)
    parser.add_argument("--layer", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--factor", type=float, default=8.0, help="(%(default)s)")
    arguments = parser.parse_args()
    name = damage(arguments.model, arguments.copy, layer=arguments.layer, factor=arguments.factor)
    print(f"{arguments.copy}: {name} times {arguments.factor:g}")


if __name__ == "__main__":
    main()
