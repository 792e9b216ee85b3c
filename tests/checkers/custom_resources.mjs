// Checks objects of the Gateway API, the Prometheus operator and KEDA against the schemas of their
// definitions. Reads a JSON list of objects; CHECKERS is the directory of the packages.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const packages = {
  "gateway.networking.k8s.io/v1": "gateway-api",
  "monitoring.coreos.com/v1": "prometheus-operator",
  "keda.sh/v1alpha1": "keda",
};
const failures = [];
for (const [at, object] of JSON.parse(readFileSync(0, "utf8")).entries()) {
  const name = `${at}: ${object.kind} ${object.metadata.name}`;
  const path = `@kubernetes-models/${packages[object.apiVersion]}/${object.apiVersion}/${object.kind}.js`;
  const model = await import(pathToFileURL(`${process.env.CHECKERS}/${path}`));
  try {
    new model[object.kind](object).validate();
  } catch (error) {
    failures.push(`${name}: ${error.message}`);
  }
}
if (failures.length > 0) {
  console.error(failures.join("\n"));
  process.exit(1);
}
