// Strict decodes Kubernetes manifests from standard input into the types of k8s.io/api, as a cluster
// does. An unknown field (also one in other letters), a field that stands twice, a wrong type or an
// unknown kind ends it with status 1.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// kinds maps apiVersion and kind to a new value of the type.
var kinds = map[string]func() any{
	"apps/v1 DaemonSet":  func() any { return new(apps.DaemonSet) },
	"apps/v1 Deployment": func() any { return new(apps.Deployment) },
	"v1 ConfigMap":       func() any { return new(core.ConfigMap) },
	"v1 Service":         func() any { return new(core.Service) },
}

var separator = regexp.MustCompile(`(?m)^---\s*$`)

func decode(document string) (string, error) {
	var head struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if err := yaml.Unmarshal([]byte(document), &head); err != nil {
		return "", err
	}
	name := head.APIVersion + " " + head.Kind
	if head.Kind == "" {
		return "", nil
	}
	found, known := kinds[name]
	if !known {
		return name, fmt.Errorf("unknown kind")
	}
	text, err := yaml.YAMLToJSONStrict([]byte(document))
	if err != nil {
		return name, err
	}
	strict, err := json.UnmarshalStrict(text, found())
	return name, errors.Join(append(strict, err)...)
}

func main() {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	status := 0
	for _, document := range separator.Split(string(text), -1) {
		name, err := decode(document)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			status = 1
		} else if name != "" {
			fmt.Println(name)
		}
	}
	os.Exit(status)
}
