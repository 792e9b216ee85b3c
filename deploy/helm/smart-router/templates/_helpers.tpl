{{/* Name of the routers and of what belongs to them. */}}
{{- define "smart-router.name" -}}
{{ .Values.name | default .Release.Name }}
{{- end }}

{{- define "smart-router.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Namespace of the agents' pods. */}}
{{- define "smart-router.agentsNamespace" -}}
{{ .Values.agents.namespace | default .Release.Namespace }}
{{- end }}

{{/* Labels of the agents' pods. Not a default of values.yaml, with which Helm would merge others. */}}
{{- define "smart-router.agentLabels" -}}
{{ .Values.agents.labels | default (dict "app" "voice-agent") | toYaml }}
{{- end }}

{{- define "smart-router.selector" -}}
{{- $parts := list -}}
{{- range $key, $value := include "smart-router.agentLabels" . | fromYaml -}}
{{- $parts = append $parts (printf "%s=%s" $key $value) -}}
{{- end -}}
{{ join "," $parts }}
{{- end }}

{{/* Keys of the Secret that verify the webhooks of each provider. */}}
{{- define "smart-router.providerKeys" -}}
twilio: TWILIO_AUTH_TOKEN
plivo: PLIVO_AUTH_TOKEN
exotel: EXOTEL_AUTH_TOKEN
signalwire: SIGNALWIRE_AUTH_TOKEN
telnyx: TELNYX_PUBLIC_KEY
vonage: VONAGE_SIGNATURE_SECRET
jambonz: JAMBONZ_WEBHOOK_SECRET
{{- end }}

{{/* Refuses a provider whose webhooks would not be verified. */}}
{{- define "smart-router.requireProviderKeys" -}}
{{- $keys := include "smart-router.providerKeys" . | fromYaml -}}
{{- range .Values.providers -}}
{{- if not (or (has (get $keys .) $.Values.secrets.keys) (has . $.Values.secrets.unverifiedProviders)) -}}
{{- fail (printf "providers has %s, but secrets.keys has no %s: anyone could send its webhooks. Add the key, or add %s to secrets.unverifiedProviders" . (get $keys .) .) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Settings of the ConfigMap: values of their own, then those of `settings`, which win. */}}
{{- define "smart-router.settings" -}}
{{- include "smart-router.requireProviderKeys" . -}}
{{- $media := ternary .Values.media.host .Values.host .Values.media.enabled -}}
{{- if hasKey (fromJson .Values.tierConfig) "Error" -}}
{{- fail (printf "tierConfig is not JSON: %s" (fromJson .Values.tierConfig).Error) -}}
{{- end -}}
{{- $settings := dict
  "PUBLIC_URL" (printf "https://%s" .Values.host)
  "POD_LABEL_SELECTOR" (include "smart-router.selector" .)
  "VOICE_AGENT_PORT" (toString .Values.agents.port)
  "PROVIDERS" (join "," .Values.providers)
  "TIER_CONFIG" .Values.tierConfig -}}
{{- $given := .Values.settings | default dict -}}
{{- with .Values.agents.namespaces -}}
{{- $_ := set $settings "NAMESPACES" (join "," .) -}}
{{- end -}}
{{- if not $given.VOICE_AGENT_BASE_URL -}}
{{- $_ := set $settings "MEDIA_URL" (printf "wss://%s" $media) -}}
{{- end -}}
{{- if ne (include "smart-router.name" .) "smart-router" -}}
{{- $_ := set $settings "LEADER_ELECTION_LOCK_NAME" (printf "%s-leader" (include "smart-router.name" .)) -}}
{{- end -}}
{{- range .Values.secrets.keys -}}
{{- $_ := set $settings (printf "%s_FILE" .) (printf "/etc/smart-router/secrets/%s" .) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings $given) -}}
{{- end }}

{{/*
Seconds of a duration such as 5m, 1h30m or off. The schema has checked its form.
*/}}
{{- define "smart-router.seconds" -}}
{{- $seconds := 0 -}}
{{- range $unit, $factor := dict "h" 3600 "m" 60 "s" 1 -}}
{{- range regexFindAll (printf "[0-9]+%s" $unit) (regexReplaceAll "[0-9]+ms" $.duration "1s") -1 -}}
{{- $seconds = add $seconds (mul $factor (trimSuffix $unit . | int)) -}}
{{- end -}}
{{- end -}}
{{ $seconds }}
{{- end }}

{{/* Egress to DNS, agents and Redis. */}}
{{- define "smart-router.egress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
- to:
    {{- range .Values.agents.namespaces | default (list .Values.agents.namespace) }}
    - podSelector:
        matchLabels:
          {{- include "smart-router.agentLabels" $ | nindent 10 }}
      {{- if . }}
      namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ . | quote }}
      {{- end }}
    {{- end }}
  ports:
    - port: {{ .Values.agents.port }}
- ports:
    {{- range .Values.networkPolicy.redisPorts }}
    - port: {{ . }}
    {{- end }}
{{- end }}
