{{- define "kvrs.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The configuration of pod `number`: that of the values, with what differs between pods. */}}
{{- define "kvrs.config" -}}
{{- $name := .root.Release.Name }}
{{- $peers := list }}
{{- $hosts := list }}
{{- $workers := int ((.root.Values.config.proxy).workers | default 1) }}
{{- range $other := until (int .root.Values.replicas) }}
{{- $host := printf "%s-%d.%s-peers" $name $other $name }}
{{- $hosts = append $hosts $host }}
{{- if ne $other $.number }}
{{- $peers = append $peers (dict "id" (printf "%s-%d" $name $other) "host" $host "peer_port" 8002 "workers" $workers) }}
{{- end }}
{{- end }}
{{- $proxy := dict "id" (printf "%s-%d" $name .number) "peers" $peers }}
{{- $_ := set $proxy "host" "0.0.0.0" }}
{{- $_ := set $proxy "port" 8000 }}
{{- $_ := set $proxy "admin_host" "0.0.0.0" }}
{{- $_ := set $proxy "admin_port" 8001 }}
{{- $_ := set $proxy "peer_host" "0.0.0.0" }}
{{- $_ := set $proxy "peer_port" 8002 }}
{{- $own := dict "proxy" $proxy "security" (dict "hosts" $hosts) }}
{{- toYaml (mustMergeOverwrite (deepCopy .root.Values.config) $own) }}
{{- end }}
