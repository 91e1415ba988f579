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

{{- /* Namespaces of the pods that proxies watch, as JSON. */}}
{{- define "kvrs.namespaces" -}}
{{- $found := list }}
{{- range .Values.config.cluster.services }}
{{- if .pods }}{{- $found = append $found (.namespace | default "default") }}{{ end }}
{{- end }}
{{- $found | uniq | toJson }}
{{- end }}

{{- /* How many proxies there may be: kvrs takes 33 processes, workers included. */}}
{{- define "kvrs.most" -}}
{{- $workers := int (include "kvrs.workers" .) }}
{{- $wanted := int (ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled) }}
{{- $room := div 33 $workers }}
{{- if gt $wanted (int $room) }}
{{- fail (printf "%d proxies of %d workers; allowed: 33 processes in all" $wanted $workers) }}
{{- end }}
{{- max 2 $wanted (min 8 $room) }}
{{- end }}

{{- /* The configuration of all pods: that of the values, with what follows from the chart. */}}
{{- define "kvrs.config" -}}
{{- $service := printf "%s-peers" .Release.Name }}
{{- $full := printf "${KVRS_POD}.%s.%s.svc" $service .Release.Namespace }}
{{- $hosts := list (printf "${KVRS_POD}.%s" $service) $full (printf "%s.%s" $full .Values.clusterDomain) }}
{{- $peers := dict "id" (printf "%s-*" .Release.Name) "host" (printf "%s-*.%s" .Release.Name $service) }}
{{- $_ := set $peers "peer_port" 8002 }}
{{- $_ := set $peers "workers" (int (include "kvrs.workers" .)) }}
{{- $_ := set $peers "most" (int (include "kvrs.most" .)) }}
{{- $proxy := dict "id" "${KVRS_POD}" "numbered_peers" $peers }}
{{- range $port, $number := dict "" 8000 "admin_" 8001 "peer_" 8002 }}
{{- $_ := set $proxy (printf "%shost" $port) "0.0.0.0" }}
{{- $_ := set $proxy (printf "%sport" $port) $number }}
{{- end }}
{{- $given := (.Values.config.security).hosts | default list }}
{{- $own := dict "proxy" $proxy "security" (dict "hosts" (concat $given $hosts)) }}
{{- toYaml (mustMergeOverwrite (deepCopy .Values.config) $own) }}
{{- end }}
