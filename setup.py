"""Puts the recipes into the wheel: they live beside the packages and are shipped inside one of them."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = "examples.toml"


class BuildWithRecipes(build_py):
    """An editable installation reads the recipes where they are; every other one gets a copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(RECIPES, self._recipes_in_build())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, self._recipes_in_build()]

    def _recipes_in_build(self) -> str:
        return str(Path(self.build_lib, "pipelines", RECIPES))


setup(cmdclass={"build_py": BuildWithRecipes})
