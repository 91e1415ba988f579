{{- define "kvrs.name" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- define "kvrs.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvrs.labels" -}}
{{ include "kvrs.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kvrs.image" -}}
{{- $image := .Values.image }}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "kvrs.workers" -}}
{{ int ((.Values.config.proxy).workers | default 1) }}
{{- end }}

{{- /* Namespaces of the pods that proxies list, as JSON. */}}
{{- define "kvrs.namespaces" -}}
{{- $found := list }}
{{- range .Values.config.cluster.services }}
{{- if .pods }}{{- $found = append $found (.namespace | default "default") }}{{ end }}
{{- end }}
{{- $found | uniq | toJson }}
{{- end }}

{{- /* The volume with the model's files. */}}
{{- define "kvrs.modelVolume" -}}
{{- if .Values.model.volume }}{{ .Values.model.volume | toJson }}
{{- else if .Values.initContainers }}{{ dict "emptyDir" dict | toJson }}
{{- else }}{{ fail "the model's config.json and tokenizer.json are missing: set model.volume, or initContainers that fetch them" }}
{{- end }}
{{- end }}

{{- /* All proxies, as the `peers` of each: kvrs takes 32 processes, workers included. */}}
{{- define "kvrs.peers" -}}
{{- $workers := int (include "kvrs.workers" .) }}
{{- $count := int .Values.replicas }}
{{- if gt (mul $count $workers) 32 }}
{{- fail (printf "%d proxies of %d workers; allowed: 32 processes in all" $count $workers) }}
{{- end }}
{{- $peers := list }}
{{- range until $count }}
{{- $name := include "kvrs.name" $ }}
{{- $id := printf "%s-%d" $name . }}
{{- $peer := dict "id" $id "host" (printf "%s.%s-peers" $id $name) "peer_port" 8002 "workers" $workers }}
{{- $peers = append $peers $peer }}
{{- end }}
{{- $peers | toJson }}
{{- end }}

{{- /* The configuration of all pods: that of the values, with what follows from the chart. */}}
{{- define "kvrs.config" -}}
{{- $service := printf "%s-peers" (include "kvrs.name" .) }}
{{- $full := printf "${KVRS_POD}.%s.%s.svc" $service .Release.Namespace }}
{{- $hosts := list (printf "${KVRS_POD}.%s" $service) $full (printf "%s.%s" $full .Values.clusterDomain) }}
{{- $proxy := dict "id" "${KVRS_POD}" "peers" (include "kvrs.peers" . | fromJsonArray) }}
{{- range $port, $number := dict "" 8000 "admin_" 8001 "peer_" 8002 }}
{{- $_ := set $proxy (printf "%shost" $port) (ternary "::" "0.0.0.0" $.Values.ipv6) }}
{{- $_ := set $proxy (printf "%sport" $port) $number }}
{{- end }}
{{- $given := (.Values.config.security).hosts | default list }}
{{- $own := dict "proxy" $proxy "security" (dict "hosts" (concat $given $hosts)) }}
{{- toYaml (mustMergeOverwrite (deepCopy .Values.config) $own) }}
{{- end }}
