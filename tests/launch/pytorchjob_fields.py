"""Writes `pytorchjob_fields.json`: the fields of a PyTorchJob, as the operator's own SDK has them.

    pip install kubeflow-training==1.9.4 kubernetes && python tests/launch/pytorchjob_fields.py

The SDK's models are generated from the operator's Go types, as its CRD is, and Kubernetes' models from its OpenAPI
document; both list each type's fields with their types. The file stores those of the types below, so that the test of
the manifest needs neither package.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("pytorchjob_fields.json")
KUBEFLOW = ("PyTorchJob", "PyTorchJobSpec", "ElasticPolicy", "RunPolicy", "ReplicaSpec")
KUBERNETES = (
    "V1ObjectMeta",
    "V1PodTemplateSpec",
    "V1PodSpec",
    "V1Container",
    "V1EnvVar",
    "V1ResourceRequirements",
    "V1SecurityContext",
    "V1Capabilities",
    "V1VolumeMount",
    "V1Volume",
    "V1PersistentVolumeClaimVolumeSource",
    "V1EmptyDirVolumeSource",
)


def fields_of(model: Any) -> dict[str, str]:
    """Field → type; both packages' notations for lists and mappings are unified."""
    kinds = {
        model.attribute_map[name]: str(kind).replace("List[", "list[") for name, kind in model.openapi_types.items()
    }
    return {name: re.sub(r"Dict\[str, (.*)\]", r"dict(str, \1)", kind) for name, kind in kinds.items()}


def main() -> None:
    from kubeflow.training import models  # type: ignore[import-not-found]
    from kubernetes import client  # type: ignore[import-not-found]

    kinds = {f"KubeflowOrgV1{name}": fields_of(getattr(models, f"KubeflowOrgV1{name}")) for name in KUBEFLOW}
    kinds |= {name: fields_of(getattr(client, name)) for name in KUBERNETES}
    FILE.write_text(json.dumps(kinds, indent=1) + "\n")


if __name__ == "__main__":
    main()
