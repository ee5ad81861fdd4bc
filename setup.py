"""Build of dualeval. Versions that were tested together are in constraints.txt."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "dualeval/__init__.py").read_text("utf-8"), re.MULTILINE
)
assert VERSION is not None

setup(
    name="dualeval",
    version=VERSION[1],
    description="Evaluate any PyTorch model on any number of processes, with the same bits on each.",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    author="the dualeval authors",
    license="MIT",
    license_files=["LICENSE"],
    keywords="evaluation pytorch distributed horovod slurm mpi metrics reproducibility",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # include: a bare find_packages() would also install top-level 'backends' and 'launch'.
    packages=find_packages(include=["dualeval", "dualeval.*"]),
    package_data={
        "dualeval": ["py.typed"],
        "dualeval.assets": ["*.gz", "*.safetensors", "*.txt"],
        "dualeval.report.page": ["*.css", "*.js", "*.j2"],
        "dualeval.tools.submit": ["slurm/*.sbatch"],
    },
    install_requires=[
        "click>=8.1",
        "numpy>=1.26",
        "pillow>=10.1",
        "pyarrow>=15",
        "rich>=13",
        "safetensors>=0.4",
        "scipy>=1.11",
        "tomli>=2; python_version < '3.11'",
        "torch>=2.8",
        "torchvision>=0.23",
    ],
    extras_require={
        # What Horovod needs to be built and to run. Itself it does not compile as it comes beside this torch:
        # 'dualeval setup-horovod' builds it.
        "horovod": ["cffi>=1.4", "cloudpickle", "packaging", "psutil", "pyyaml", "setuptools", "wheel"],
        "mpi": ["mpi4py>=4"],
        "qa": ["transformers>=4.48"],
        "hf": ["transformers>=4.48"],
        "peft": ["transformers>=4.48", "peft>=0.17"],
        "lm-eval": ["lm_eval>=0.4.13,<0.5", "transformers>=4.48"],
        "detection": ["pycocotools>=2.0.8"],
        "timm": ["timm>=1.0"],
        "report": ["jinja2>=3.1", "matplotlib>=3.8"],
        "plots": ["matplotlib>=3.8"],
        "torchmetrics": ["torchmetrics>=1.4"],
        # matplotlib: the picture of a confusion matrix.
        "tensorboard": ["tensorboard>=2.16", "matplotlib>=3.8"],
        "wandb": ["wandb>=0.19", "matplotlib>=3.8"],
        "mlflow": ["mlflow-skinny>=2.16", "matplotlib>=3.8"],
        "dev": [
            "axe-playwright-python",
            "build",
            "datasets",
            "hypothesis",
            "jedi",
            "jinja2",
            "jiwer",
            "matplotlib",
            "mlflow-skinny",
            "mypy",
            "playwright",
            "psutil",
            "pycocotools",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "pytrec-eval-terrier",
            "pyyaml",
            "ruff",
            "scikit-learn",
            "tensorboard",
            "torchmetrics",
            "wandb",
        ],
    },
    entry_points={"console_scripts": ["dualeval = dualeval.__main__:main"]},
)
