"""Generates muster/v1/*_pb2.py from the .proto files while the package is built; the rest is in pyproject.toml."""
import pathlib
import shutil
import subprocess
import sys

import google.protobuf
from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
PROTOS = ["muster/v1/job.proto", "muster/v1/service.proto", "muster/v1/error.proto", "muster/v1/token.proto",
          "muster/v1/recall.proto"]


def compiler():
    """protoc of the machine, else that of grpcio-tools, which a build of its own installs."""
    return [shutil.which("protoc")] if shutil.which("protoc") else [sys.executable, "-m", "grpc_tools.protoc"]


class Build(build_py):
    def run(self):
        super().run()
        command = [*compiler(), f"-I{HERE / 'proto'}", f"--python_out={self.build_lib}", *PROTOS]
        subprocess.run(command, check=True)
        (pathlib.Path(self.build_lib) / "muster/v1/__init__.py").touch()


# What is generated needs a protobuf library at least as new as its generator.
setup(packages=["muster"], package_data={"muster": ["py.typed"]}, cmdclass={"build_py": Build},
      install_requires=["grpcio>=1.48", f"protobuf>={google.protobuf.__version__}"])
