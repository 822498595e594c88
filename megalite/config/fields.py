"""What sections of a configuration are made of: their base class, and numbers that are numbers."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError


def _number(value: Any) -> Any:
    """Refuse what pydantic would turn into a number: true is not 1, and "4" is a text."""
    if isinstance(value, bool | str):
        raise PydanticCustomError("number_type", "a number is needed")
    return value


Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_number)]
Positive = Annotated[int, Field(gt=0), BeforeValidator(_number)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0), BeforeValidator(_number)]
PositiveReal = Annotated[float, Field(gt=0.0), BeforeValidator(_number)]
Share = Annotated[float, Field(ge=0.0), BeforeValidator(_number)]
Flag = Annotated[bool, Strict()]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, every field documented in the JSON schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def _fill(self, **values: Any) -> None:
        """Set fields that were left out, while the object is being built; afterwards it is frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)
