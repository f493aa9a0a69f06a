{{- define "kvdepot.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvdepot.labels" -}}
app.kubernetes.io/name: kvdepot
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kvdepot.gib" -}}
{{ printf "%dGi" (int64 .) }}
{{- end }}

{{- /* The user of a pod; the platform chooses one if none is given. */ -}}
{{- define "kvdepot.podSecurity" -}}
runAsNonRoot: true
{{- if .Values.uid }}
runAsUser: {{ int64 .Values.uid }}
runAsGroup: {{ int64 .Values.uid }}
fsGroup: {{ int64 .Values.uid }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvdepot.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end }}

{{- /* A claim that lives as long as its pod. */ -}}
{{- define "kvdepot.ephemeral" -}}
volumeClaimTemplate:
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClassName }}
    storageClassName: {{ . | quote }}
    {{- end }}
    resources:
      requests:
        # The file system needs a part for itself.
        storage: {{ include "kvdepot.gib" (add (int64 .capacityGiB) (div (int64 .capacityGiB) 10) 1) }}
{{- end }}

{{- /* The options of `kvdepot serve`, as YAML. */ -}}
{{- define "kvdepot.config" -}}
{{- $server := .Values.server -}}
{{- $own := dict "pipeline" (join "|" $server.tiers) -}}
{{- if has "Cache" $server.tiers -}}
{{- $_ := set $own "cache" (dict "capacity" (printf "%dGiB" (int64 $server.cacheGiB))) -}}
{{- end -}}
{{- range $tier := list "Dax" "Nvme" -}}
{{- if has $tier $server.tiers -}}
{{- $arena := dict "path" "/var/lib/kvdepot/kv.arena" "capacity" (printf "%dGiB" (int64 $server.arena.capacityGiB)) -}}
{{- $_ := set $own (lower $tier) $arena -}}
{{- end -}}
{{- end -}}
{{- if has "Posix" $server.tiers -}}
{{- $_ := set $own "posix" (dict "path" "/var/lib/kvdepot-posix/blocks" "capacity" (printf "%dGiB" (int64 $server.posix.capacityGiB))) -}}
{{- end -}}
{{- if has "S3" $server.tiers -}}
{{- $s3 := dict "url" $server.s3.url "capacity" (printf "%dGiB" (int64 $server.s3.capacityGiB)) -}}
{{- with $server.s3.endpoint -}}{{- $_ := set $s3 "endpoint" . -}}{{- end -}}
{{- with $server.s3.region -}}{{- $_ := set $s3 "region" . -}}{{- end -}}
{{- $_ := set $own "s3" $s3 -}}
{{- end -}}
{{- if has "Peer" $server.tiers -}}
{{- $peer := dict "etcd" $server.peer.etcd "capacity" (printf "%dGiB" (int64 $server.peer.capacityGiB)) "token_file" "/run/secrets/kvdepot/token" -}}
{{- $_ := set $own "peer" $peer -}}
{{- end -}}
{{- if $server.macKeySecret -}}
{{- $_ := set $own "mac_key_file" "/run/secrets/kvdepot/mac" -}}
{{- end -}}
{{- mergeOverwrite (deepCopy $server.options) $own | toYaml -}}
{{- end }}
