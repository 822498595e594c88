"""Which links a pipeline stage owns, and which ZeRO unit each of their parameters belongs to.

Only the links of this rank's stages are built, on the meta device. A tied embedding is one Parameter when the first
and the last stage lie on this rank, else each stage holds a copy; its unit `tied` holds it alone, so that it has the
same flat layout on both.
"""

from torch import nn

from megalite.config.schema import Config
from megalite.mesh import Mesh
from megalite.model.context import ModelContext, model_context
from megalite.model.gpt import Block, EmbeddingLink, HeadLink, Link
from megalite.model.positions import RopeTables, make_rope_tables

Places = list[tuple[nn.Module, str, str]]
"""(module, attribute, parameter's name in this model) of each parameter of a unit; a shared one has two entries."""


class Stage(nn.Module):
    """A run of links; `index` along the whole pipeline of `num_stages`."""

    def __init__(self, index: int, links: list[Link], *, num_stages: int):
        super().__init__()
        self.index = index
        self.links = nn.ModuleList(links)
        self.is_first = index == 0
        self.is_last = index == num_stages - 1


def build_stages(config: Config, mesh: Mesh, stages: list[int]) -> list[Stage]:
    """Build the stages with the given indices, with parameters on the meta device that carry their specs."""
    context = model_context(config, mesh)
    rope_tables = make_rope_tables(config.model, context.dtype) if config.model.position == "rope" else None
    bounds = config.stage_layers
    built = [_build_stage(index, bounds, context, rope_tables) for index in stages]
    first = next((stage for stage in built if stage.is_first), None)
    last = next((stage for stage in built if stage.is_last), None)
    if config.model.tie_embeddings and first is not None and last is not None:
        last.links[-1].output.weight = first.links[0].word.weight
    return built


def _build_stage(
    index: int, bounds: tuple[tuple[int, int], ...], context: ModelContext, rope_tables: RopeTables | None
) -> Stage:
    links: list[Link] = [Block(layer, context, rope_tables) for layer in range(*bounds[index])]
    if index == 0:
        links.insert(0, EmbeddingLink(context))
    if index == len(bounds) - 1:
        links.append(HeadLink(context))
    return Stage(index, links, num_stages=len(bounds))


def stage_units(stages: list[Stage]) -> dict[str, Places]:
    """The ZeRO units of these stages, in the order of the chain: one per block, `embedding`, `head`, `tied`."""
    units: dict[str, Places] = {}
    for stage in stages:
        for link in stage.links:
            for name in link.unit_names:
                units.setdefault(name, [])
            own = next((name for name in link.unit_names if name != "tied"), "tied")
            for path, module in link.named_modules():
                for attribute, param in module.named_parameters(recurse=False):
                    unit = "tied" if param.spec.tied else own
                    units[unit].append((module, attribute, _name(own, unit, path, attribute)))
    return units


def _name(own: str, unit: str, path: str, attribute: str) -> str:
    """The parameter's name: the logical one, with fused tensors under the name of the fused layer."""
    if unit == "tied":
        return f"embedding.word.{attribute}"
    if own == "head":
        return f"head.{attribute}" if path == "output" else f"{path}.{attribute}"
    return f"{own}.{path}.{attribute}"
