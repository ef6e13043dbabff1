"""What can be wrong with a layout or a pair of layouts; all are found before any communication."""


class LayoutError(ValueError):
    """A layout, or a pair of layouts, that cannot be; the base of this package's layout errors."""


class PlacementCountError(LayoutError):
    """There is not one placement for each mesh axis."""


class PlacementTypeError(LayoutError):
    """Something given as a placement, layout or DTensor that is none, or none that is known."""


class ShardDimError(LayoutError):
    """A placement shards a dim that the tensor does not have."""


class ShardOrderError(LayoutError):
    """A shard order does not list exactly the axes that shard a dim."""


class MixedPartialError(LayoutError):
    """Partial values of several axes whose reductions do not commute."""


class PartialTargetError(LayoutError):
    """A target asks for partial values that the source does not hold."""


class PartialSourceError(LayoutError):
    """A transfer would have to reduce partial values; it only moves data."""


class RankNotInMesh(LayoutError):
    """A rank that holds no part of the layout."""


class CrossMeshError(LayoutError):
    """Source and target lie on different meshes."""


class LocalShapeMismatch(LayoutError):
    """A rank's local tensor has another shape than its layout says."""
