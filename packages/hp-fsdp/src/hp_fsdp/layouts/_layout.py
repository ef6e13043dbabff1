"""The layouts that a group can have; what they have in common `ExactLayout` says."""

from ._exact import ExactLayout
from ._extended import ExtendedLayout
from ._ragged import RaggedLayout

Layout = ExactLayout | RaggedLayout | ExtendedLayout
